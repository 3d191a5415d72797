// What this CPU can do, as levels that a kernel row can name. Kernel rows carry the level as a string; Python compares.
#pragma once

namespace twofour {

// Highest level whose instructions this CPU and operating system support: "scalar", "avx2" or "avx512".
// "avx2" means AVX2 + FMA; "avx512" means F, BW, DQ and VL, as the kernels are compiled.
inline const char* detect_isa() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "scalar";
}

}  // namespace twofour
