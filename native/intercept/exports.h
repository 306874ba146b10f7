// Declarations of the exported functions that no header of ours declares.
#ifndef FLOWGPU_INTERCEPT_EXPORTS_H
#define FLOWGPU_INTERCEPT_EXPORTS_H

#define FG_PLAIN(name, refuse) extern "C" __attribute__((visibility("default"))) void name();
#include "generated/plain.inc"
#undef FG_PLAIN

#endif
