// The kernel, as text that ends with a null byte.
    .section .rodata
    .globl flowgpu_nccl_ptx
    .hidden flowgpu_nccl_ptx
flowgpu_nccl_ptx:
    .incbin FN_PTX
    .byte 0
    .section .note.GNU-stack, "", @progbits
