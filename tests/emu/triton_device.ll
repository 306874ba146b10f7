; The functions that Triton takes from NVIDIA's libdevice, as the kernels of the tests need them: each
; is what the PTX ISA has for it, so that none of NVIDIA's code gets into the PTX that is kept.

declare float @llvm.nvvm.ex2.approx.f(float)
declare float @llvm.nvvm.lg2.approx.f(float)
declare float @llvm.nvvm.rsqrt.approx.f(float)
declare float @llvm.nvvm.sin.approx.f(float)
declare float @llvm.nvvm.cos.approx.f(float)
declare float @llvm.nvvm.sqrt.approx.f(float)
declare double @llvm.nvvm.sqrt.rn.d(double)
declare float @llvm.floor.f32(float)
declare float @llvm.ceil.f32(float)
declare double @llvm.floor.f64(double)

define float @__nv_exp2f(float %x) {
  %y = call float @llvm.nvvm.ex2.approx.f(float %x)
  ret float %y
}

define float @__nv_log2f(float %x) {
  %y = call float @llvm.nvvm.lg2.approx.f(float %x)
  ret float %y
}

define float @__nv_logf(float %x) {
  %y = call float @llvm.nvvm.lg2.approx.f(float %x)
  %z = fmul float %y, 0x3FE62E4300000000 ; ln 2
  ret float %z
}

define float @__nv_rsqrtf(float %x) {
  %y = call float @llvm.nvvm.rsqrt.approx.f(float %x)
  ret float %y
}

define float @__nv_sinf(float %x) {
  %y = call float @llvm.nvvm.sin.approx.f(float %x)
  ret float %y
}

define float @__nv_cosf(float %x) {
  %y = call float @llvm.nvvm.cos.approx.f(float %x)
  ret float %y
}

define float @__nv_sqrtf(float %x) {
  %y = call float @llvm.nvvm.sqrt.approx.f(float %x)
  ret float %y
}

define double @__nv_sqrt(double %x) {
  %y = call double @llvm.nvvm.sqrt.rn.d(double %x)
  ret double %y
}

define float @__nv_floorf(float %x) {
  %y = call float @llvm.floor.f32(float %x)
  ret float %y
}

define float @__nv_ceilf(float %x) {
  %y = call float @llvm.ceil.f32(float %x)
  ret float %y
}

define double @__nv_floor(double %x) {
  %y = call double @llvm.floor.f64(double %x)
  ret double %y
}
