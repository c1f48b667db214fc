/* library_cuda.cpp: _C_cuda, the CUDA kernels of the ops that _C defines, and their overrides of
 * aten's. */
#include <Python.h>

#include "flash.h"
#include "override_cuda.h"
#include "staged.h"
#include "stages.h"
#include "varlen.h"

namespace attn_ext {

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("scale", TORCH_BOX(&scale<attn_scale_cuda>));
  m.impl("masked_fill", TORCH_BOX(&masked_fill));
  m.impl("masked_fill_", TORCH_BOX(&masked_fill_<attn_masked_fill_cuda>));
  m.impl("softmax", TORCH_BOX(&softmax<attn_softmax_cuda>));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward<attn_softmax_backward_cuda>));
  m.impl("dropout", TORCH_BOX(&dropout<attn_dropout_cuda>));
  m.impl("naive_attention", TORCH_BOX(&staged_attention<Fill::out_of_place>));
  m.impl("inplace_attention", TORCH_BOX(&staged_attention<Fill::in_place>));
  m.impl("flash_attention_forward", TORCH_BOX(&flash_attention_forward<Cuda>));
  m.impl("flash_attention_backward", TORCH_BOX(&flash_attention_backward<Cuda>));
  m.impl("flash_attention_varlen_forward", TORCH_BOX(&flash_attention_varlen_forward<Cuda>));
  m.impl("flash_attention_varlen_backward", TORCH_BOX(&flash_attention_varlen_backward<Cuda>));
}

} // namespace attn_ext

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyMethodDef methods[] = {
      {"install_overrides", attn_ext::install_overrides<&attn_ext::add_overrides_cuda>, METH_NOARGS,
       "Puts the kernels for CUDA in the place of torch's own."},
      {"remove_overrides", attn_ext::remove_overrides, METH_NOARGS, "Takes them away again."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
