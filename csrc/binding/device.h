/* device.h: how a checked call reaches kernels, on the CPU through torch's thread pool, on CUDA on
 * the current stream of the tensors' device. Overloads tell the two apart by the kernel's type. */
#pragma once

#include <cstring>

#include "tensors.h"

#ifdef USE_CUDA
#  include <cuda_runtime_api.h>
#endif

namespace attn_ext {

/* Rows or tiles of at most this much work go to one thread at a time. */
inline void run(const char *, attn_stage_cpu_fn *kernel, const Tensor &, const attn_stage &stage) {
  int64_t rows = stage.batch * stage.heads * stage.rows;
  int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, stage.cols));
  torch::stable::parallel_for(0, rows, grain,
                              [&](int64_t begin, int64_t end) { kernel(&stage, begin, end); });
}

/* Fused attention on the CPU. Each tile is large: a grain of 1. */
struct Cpu {
  explicit Cpu(const Tensor &) {}

  int64_t forward_workspace(const attn_args &) const { return 0; }

  void forward(const char *, const attn_args &args) const {
    each_sequence(args, true, [](const attn_args &one) {
      torch::stable::parallel_for(
          0, attn_flash_fwd_tiles_cpu(&one), 1,
          [&](int64_t begin, int64_t end) { attn_flash_fwd_cpu(&one, begin, end); });
    });
  }

  int64_t backward_workspace(const attn_args &args) const {
    int64_t most = 0;
    each_sequence(args, false, [&](const attn_args &one) {
      most = std::max(most, attn_flash_bwd_workspace_cpu(&one));
    });
    return most;
  }

  void backward(const char *, const attn_args &args) const {
    each_sequence(args, false, [](const attn_args &one) {
      for (int phase = 0; phase < ATTN_BWD_PHASES; ++phase) {
        auto which = static_cast<attn_bwd_phase>(phase);
        torch::stable::parallel_for(
            0, attn_flash_bwd_tiles_cpu(&one, which), 1,
            [&](int64_t begin, int64_t end) { attn_flash_bwd_cpu(&one, which, begin, end); });
      }
    });
  }

private:
  /* Calls with a dense batch: with args, or with each sequence of a packed batch in turn. Packed
   * logsumexp is [Hq, total_q], a sequence's [Hq, Sq]: it passes through `rows`. */
  template <class Call>
  static void each_sequence(const attn_args &args, bool writes_logsumexp, const Call &call) {
    if (args.cu_seq_q == nullptr)
      return call(args);
    size_t size = args.dtype == ATTN_F64 ? sizeof(double) : sizeof(float);
    std::vector<char> rows;
    for (int64_t b = 0; b < args.batch; ++b) {
      attn_args one = sequence(args, b);
      rows.resize(static_cast<size_t>(args.heads * one.seq_q) * size);
      one.logsumexp = rows.data();
      auto pass = [&](bool out) {
        for (int64_t h = 0; h < args.heads; ++h) {
          char *packed = static_cast<char *>(args.logsumexp) +
                         static_cast<size_t>(h * args.total_q + args.cu_seq_q[b]) * size;
          char *row = rows.data() + static_cast<size_t>(h * one.seq_q) * size;
          size_t bytes = static_cast<size_t>(one.seq_q) * size;
          std::memcpy(out ? packed : row, out ? row : packed, bytes);
        }
      };
      if (!writes_logsumexp)
        pass(false);
      call(one);
      if (writes_logsumexp)
        pass(true);
    }
  }

  static attn_args sequence(const attn_args &args, int64_t b) {
    attn_args one = args;
    int64_t q = args.cu_seq_q[b], k = args.cu_seq_k[b];
    int64_t size = args.dtype == ATTN_F64 ? 8 : args.dtype == ATTN_F32 ? 4 : 2;
    auto shift = [size](attn_tensor &tensor, int64_t row) {
      if (tensor.data != nullptr)
        tensor.data = static_cast<char *>(tensor.data) + row * tensor.stride_s * size;
    };
    for (attn_tensor *tensor : {&one.query, &one.out, &one.grad_out, &one.grad_query})
      shift(*tensor, q);
    for (attn_tensor *tensor : {&one.key, &one.value, &one.grad_key, &one.grad_value})
      shift(*tensor, k);
    one.batch = 1;
    one.total_q = one.seq_q = args.cu_seq_q[b + 1] - q;
    one.total_k = one.seq_k = args.cu_seq_k[b + 1] - k;
    one.first_head = b * args.heads;
    one.cu_seq_q = one.cu_seq_k = nullptr;
    return one;
  }
};

#ifdef USE_CUDA

/* The tensors' device made current, and its current stream. */
struct CudaStream {
  torch::stable::accelerator::DeviceGuard guard;
  void *stream = nullptr;

  explicit CudaStream(const Tensor &on) : guard(on.get_device_index()) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  }
};

inline void check_status(const char *op, int status) {
  if (status == ATTN_OK)
    return;
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  ATTN_CHECK(status != ATTN_NO_DEVICE_CODE, op, "needs a GPU of compute capability 8.0 or later, ",
             "got ", major, ".", minor, "; backend=\"auto\" and torch's backends still run there");
  ATTN_CHECK(status > 0, op, "no kernel takes these arguments on compute capability ", major, ".",
             minor);
  auto error = static_cast<cudaError_t>(status);
  ATTN_CHECK(false, op, "CUDA error: ", cudaGetErrorString(error));
}

inline void run(const char *op, attn_stage_cuda_fn *kernel, const Tensor &on,
                const attn_stage &stage) {
  CudaStream cuda(on);
  check_status(op, kernel(&stage, cuda.stream));
}

struct Cuda : CudaStream {
  using CudaStream::CudaStream;

  int64_t forward_workspace(const attn_args &args) const {
    return attn_flash_fwd_workspace_cuda(&args);
  }
  void forward(const char *op, const attn_args &args) const {
    check_status(op, attn_flash_fwd_cuda(&args, stream));
  }
  int64_t backward_workspace(const attn_args &args) const {
    return attn_flash_bwd_workspace_cuda(&args);
  }
  void backward(const char *op, const attn_args &args) const {
    check_status(op, attn_flash_bwd_cuda(&args, stream));
  }
};

#endif

} // namespace attn_ext
