/* library.cpp: _C, the library that every installation loads: schemas, CPU kernels, and the staged
 * ops, which call others through the dispatcher and so are the same on every device. */
#include <Python.h>

#include "flash.h"
#include "override_cpu.h"
#include "staged.h"
#include "stages.h"
#include "varlen.h"

namespace attn_ext {

/* clang-format off: schemas read as one line of arguments after the other. */
#define STAGED                                                                                     \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "         \
  "bool is_causal=False, Tensor? rng_state=None, *, float? scale=None) "                           \
  "-> (Tensor out, Tensor attn_weights)"
#define BAND "float? scale=None, int? window_size_left=None, int? window_size_right=None"

STABLE_TORCH_LIBRARY(attn_ext, m) {
  m.def("scale(Tensor scores, float scale) -> Tensor");
  m.def("masked_fill(Tensor scores, Tensor? mask, float value, *, bool is_causal=False) -> Tensor");
  m.def("masked_fill_(Tensor(a!) scores, Tensor? mask, float value, *, bool is_causal=False) "
        "-> ()");
  m.def("softmax(Tensor scores) -> Tensor");
  m.def("softmax_backward(Tensor grad_output, Tensor output) -> Tensor");
  m.def("dropout(Tensor probs, float p, Tensor rng_state) -> Tensor");

  m.def("naive_attention" STAGED);
  m.def("inplace_attention" STAGED);

  m.def("flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0.0, bool is_causal=False, Tensor? rng_state=None, *, " BAND ", "
        "bool bottom_right=False, float softcap=0.0, bool deterministic=False) "
        "-> (Tensor out, Tensor logsumexp)");
  m.def("flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor? attn_mask, float dropout_p, bool is_causal, "
        "Tensor? rng_state, bool[4] output_mask, *, " BAND ", bool bottom_right=False, "
        "float softcap=0.0, bool deterministic=False) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_mask)");
  m.def("flash_attention_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p=0.0, bool is_causal=False, "
        "Tensor? rng_state=None, *, " BAND ", float softcap=0.0, bool deterministic=False) "
        "-> (Tensor out, Tensor logsumexp)");
  m.def("flash_attention_varlen_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, float dropout_p, bool is_causal, Tensor? rng_state, bool[3] output_mask, "
        "*, " BAND ", float softcap=0.0, bool deterministic=False) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}
/* clang-format on */

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("scale", TORCH_BOX(&scale<attn_scale_cpu>));
  m.impl("masked_fill", TORCH_BOX(&masked_fill));
  m.impl("masked_fill_", TORCH_BOX(&masked_fill_<attn_masked_fill_cpu>));
  m.impl("softmax", TORCH_BOX(&softmax<attn_softmax_cpu>));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward<attn_softmax_backward_cpu>));
  m.impl("dropout", TORCH_BOX(&dropout<attn_dropout_cpu>));
  m.impl("naive_attention", TORCH_BOX(&staged_attention<Fill::out_of_place>));
  m.impl("inplace_attention", TORCH_BOX(&staged_attention<Fill::in_place>));
  m.impl("flash_attention_forward", TORCH_BOX(&flash_attention_forward<Cpu>));
  m.impl("flash_attention_backward", TORCH_BOX(&flash_attention_backward<Cpu>));
  m.impl("flash_attention_varlen_forward", TORCH_BOX(&flash_attention_varlen_forward<Cpu>));
  m.impl("flash_attention_varlen_backward", TORCH_BOX(&flash_attention_varlen_backward<Cpu>));
}

/* The ops above and the overrides of aten's, plus which build of the CPU kernels this process uses.
 */
static PyObject *isa(PyObject *, PyObject *) {
  const char *name = attn_isa_cpu();
  if (name != nullptr)
    return PyUnicode_FromString(name);
  PyErr_Format(PyExc_RuntimeError,
               "ATTN_EXT_ISA: expected an instruction set that this CPU runs, one of base, avx2, "
               "avx512; got %s",
               getenv("ATTN_EXT_ISA"));
  return nullptr;
}

} // namespace attn_ext

PyMODINIT_FUNC PyInit__C(void) {
  static PyMethodDef methods[] = {
      {"isa", attn_ext::isa, METH_NOARGS, "The instruction set of the CPU kernels in use."},
      {"install_overrides", attn_ext::install_overrides<&attn_ext::add_overrides_cpu>, METH_NOARGS,
       "Puts the kernels for CPU in the place of torch's own."},
      {"remove_overrides", attn_ext::remove_overrides, METH_NOARGS, "Takes them away again."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
