/* device.h: how a checked call reaches kernels, on the CPU through torch's thread pool, on CUDA on
 * the current stream of the tensors' device. Overloads tell the two apart by the kernel's type. */
#pragma once

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
    torch::stable::parallel_for(
        0, attn_flash_fwd_tiles_cpu(&args), 1,
        [&](int64_t begin, int64_t end) { attn_flash_fwd_cpu(&args, begin, end); });
  }

  int64_t backward_workspace(const attn_args &args) const {
    return attn_flash_bwd_workspace_cpu(&args);
  }

  void backward(const char *, const attn_args &args) const {
    for (int phase = 0; phase < ATTN_BWD_PHASES; ++phase) {
      auto which = static_cast<attn_bwd_phase>(phase);
      torch::stable::parallel_for(
          0, attn_flash_bwd_tiles_cpu(&args, which), 1,
          [&](int64_t begin, int64_t end) { attn_flash_bwd_cpu(&args, which, begin, end); });
    }
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
