// What this CPU can do, as instruction sets that a kernel row can name. Rows carry the name; Python compares.
#pragma once

#include <cstring>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twofour {

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
}
inline bool has_avx512_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}
inline bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// AMX needs the CPU (CPUID 7.0 EDX: bit 22 bf16, 24 tiles, 25 int8) and the kernel's permission to use the tile
// registers, asked for once per process (Linux, Documentation/arch/x86/xstate.rst: ARCH_REQ_XCOMP_PERM, feature 18).
inline bool has_amx() {
#if defined(__linux__)
  if (!has_avx512_vnni() || !has_avx512_bf16() || !__builtin_cpu_supports("avx512vbmi2")) return false;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;
  if ((edx & needed) != needed) return false;
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
#else
  return false;
#endif
}

// Whether this CPU and operating system run instruction set `name`: "scalar"; "avx2" (with FMA); "avx512" (F, BW, DQ,
// VL and BMI2); "avx512_bf16"; "avx512_vnni" (VNNI, VBMI); "amx" (tiles, bf16, int8, and the AVX-512 sets with VBMI2).
inline bool cpu_has(const char* name) {
  __builtin_cpu_init();
  if (std::strcmp(name, "scalar") == 0) return true;
  if (std::strcmp(name, "avx2") == 0) return has_avx2();
  if (std::strcmp(name, "avx512") == 0) return has_avx512();
  if (std::strcmp(name, "avx512_bf16") == 0) return has_avx512_bf16();
  if (std::strcmp(name, "avx512_vnni") == 0) return has_avx512_vnni();
  return std::strcmp(name, "amx") == 0 && has_amx();
}

#else

inline bool cpu_has(const char* name) { return std::strcmp(name, "scalar") == 0; }

#endif

}  // namespace twofour
