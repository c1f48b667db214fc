/* override.h: kernels of ours in the place of torch's own under ops of aten, put there and taken
 * away at run time. A call that ours does not take goes to torch's kernel, which
 * attn_ext/activate.py keeps under attn_ext::native_<name of the op>. */
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "flash.h"

namespace attn_ext {

using torch::stable::detail::StableLibrary;

/* An op's name as a template argument. */
template <size_t size> struct OpName {
  char text[size];
  constexpr OpName(const char (&name)[size]) { std::copy_n(name, size, text); }
};

/* Runs torch's own kernel on a stack of arguments. Its error comes out with its own text, where
 * torch (2.13 on) hands that over.
 *
 * torch_call_dispatcher takes the type of a result from the mirrored place of the schema. For the
 * one op whose results have other types backwards, the native op has two of them in each other's
 * places, which makes them a palindrome: Tensor but for the fourth and the sixth. */
inline void call_native(const char *op, StableIValue *stack) {
  std::string native = std::string("attn_ext::native") + op;
  if (torch_call_dispatcher(native.c_str(), "", stack, TORCH_ABI_VERSION) == 0) {
    if (std::string_view(op) == "_scaled_dot_product_flash_attention")
      std::swap(stack[3], stack[4]);
    return;
  }
  using What = const char *(*)();
  auto what =
      reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  ATTN_CHECK(what == nullptr, "activate", what());
  ATTN_CHECK(false, "activate", "torch's own kernel of aten::", op,
             " refused a call that attn_ext does not take either; the reason is on stderr");
}

/* What the dispatcher calls. `kernel` has the leading arguments of the op and returns its results,
 * or nothing where it does not take the call. Later versions of torch append arguments: one that is
 * None, False or 0, all of which are 0 on the stack, asks for nothing. */
template <OpName name, auto kernel> struct Override;
template <OpName name, class... Results, class... Args,
          std::optional<std::tuple<Results...>> (*kernel)(Args...)>
struct Override<name, kernel> {
  using Values = std::tuple<torch::stable::detail::unbox_type_t<Args>...>;

  static void boxed(StableIValue *stack, uint64_t num_args, uint64_t num_results) {
    if (num_args >= sizeof...(Args) && num_results == sizeof...(Results) &&
        std::all_of(stack + sizeof...(Args), stack + num_args, [](auto v) { return v == 0; })) {
      auto values =
          torch::stable::detail::unbox_to_tuple<torch::stable::detail::unbox_type_t<Args>...>(
              stack);
      if (auto results = std::apply(kernel, values))
        return torch::stable::detail::box_from_tuple<Results...>(stack, *results);
      box(stack, values, std::index_sequence_for<Args...>());
    }
    call_native(name.text, stack);
  }

private:
  template <size_t... at>
  static void box(StableIValue *stack, const Values &values, std::index_sequence<at...>) {
    ((stack[at] = torch::stable::detail::from(std::get<at>(values))), ...);
  }
};

template <OpName name, auto kernel> void add_override(StableLibrary &library) {
  library.impl(name.text, &Override<name, kernel>::boxed);
}

/* The overrides of this library while they are in place. */
inline std::unique_ptr<StableLibrary> &overrides() {
  static std::unique_ptr<StableLibrary> library;
  return library;
}

/* Module methods: put the overrides of a dispatch key in place, take them away. Both may be called
 * twice; the caller holds a lock. */
template <auto add_all> PyObject *install_overrides(PyObject *, PyObject *) {
  try {
    if (overrides() == nullptr) {
      overrides() = add_all();
    }
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return Py_NewRef(Py_None);
}

inline PyObject *remove_overrides(PyObject *, PyObject *) {
  overrides().reset();
  return Py_NewRef(Py_None);
}

/* What an override takes is what our checks pass: what they refuse is torch's to run, or to refuse
 * in its own words. Dropout too, since its pattern would be drawn from another generator. */
template <class Call, class... Args>
std::optional<Call> taken(double dropout_p, const Args &...args) {
  if (dropout_p != 0.0)
    return std::nullopt;
  try {
    Call call(args...);
    if (call.head_dim == call.head_dim_v)
      return call;
  } catch (const std::exception &) {
  }
  return std::nullopt;
}

/* torch's autograd hands on an optional tensor that it saved as none as an undefined one. */
inline MaybeTensor if_defined(const MaybeTensor &tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

/* Kernels read and write rows; empty_like keeps a last stride that is not 1. */
inline bool has_unit_rows(const Tensor &tensor) {
  int64_t last = tensor.dim() - 1;
  return tensor.stride(last) == 1 || tensor.size(last) <= 1;
}

/* The three gradients, written to [B, H, S, D]; false where a check refuses the call. */
template <class Device, class Call>
bool backward_into(Call &call, const Tensor &grad_out_in, const Tensor &out_in,
                   const Tensor &logsumexp_in, const Sizes &logsumexp_shape,
                   const std::array<Tensor, 3> &grads, bool deterministic) {
  Tensor logsumexp = torch::stable::contiguous(logsumexp_in);
  try {
    call.check_backward(grad_out_in, out_in, logsumexp, logsumexp_shape, {true, true, true}, 3);
  } catch (const std::exception &) {
    return false;
  }
  if (!std::all_of(grads.begin(), grads.end(), has_unit_rows))
    return false;
  call.prepare();
  Tensor grad_out = with_unit_rows(grad_out_in), out = with_unit_rows(out_in);
  attn_args &args = call.args;
  args.out = view_of(out), args.grad_out = view_of(grad_out);
  args.logsumexp = const_cast<void *>(logsumexp.const_data_ptr());
  args.grad_query = view_of(grads[0]), args.grad_key = view_of(grads[1]);
  args.grad_value = view_of(grads[2]);
  args.deterministic = deterministic;
  call.template backward<Device>();
  return true;
}

} // namespace attn_ext
