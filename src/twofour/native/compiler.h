// What the kernels ask of the compiler beyond the language: full unrolling and forced (or forbidden) inlining.
#pragma once

#define TWOFOUR_INLINE inline __attribute__((always_inline))
#define TWOFOUR_INLINED __attribute__((always_inline))  // of a lambda
#define TWOFOUR_NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define TWOFOUR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TWOFOUR_UNROLL _Pragma("GCC unroll 16")
#endif
