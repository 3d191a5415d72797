// What this CPU can do, as instruction sets that a kernel row can name: the rows of isa.def.
#pragma once

#include <cstring>

#if defined(TWOFOUR_X86)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(TWOFOUR_ARM)
#include <sys/auxv.h>
#endif
#if defined(__APPLE__) && defined(TWOFOUR_ARM)
#include <sys/sysctl.h>
#endif
#if defined(__linux__) && defined(TWOFOUR_X86)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twofour {

#ifdef TWOFOUR_X86

#define CPU(feature) (__builtin_cpu_supports(feature) != 0)

inline bool has_avx512() {
  return CPU("avx512f") && CPU("avx512bw") && CPU("avx512dq") && CPU("avx512vl") && CPU("bmi2");
}

// CPUID 7.1 EAX bit 4; compilers of some age do not know the feature by its name.
inline bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}

// AMX needs the CPU (CPUID 7.0 EDX: bit 22 bf16, 24 tiles, 25 int8) and the kernel's permission to use the tile
// registers, asked for once per process (Linux, Documentation/arch/x86/xstate.rst: ARCH_REQ_XCOMP_PERM, feature 18). Where
// tiles are emulated (kernels/tile_unit.h) the other instructions of its kernels suffice.
inline bool has_amx() {
#if defined(TWOFOUR_EMULATE_TILES)
  return CPU("avx512vbmi2");  // BF16 and VBMI are asked of the parents
#elif defined(__linux__)
  if (!CPU("avx512vbmi2")) return false;
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

#define TWOFOUR_ON_x86(...) __VA_ARGS__
#else
#define TWOFOUR_ON_x86(...)
#endif

#ifdef TWOFOUR_ARM

// A feature as Arm names it, FEAT_DotProd and so on. Linux, <asm/hwcap.h> for arm64: bit 20 of the first word is DotProd; 13
// and 14 of the second I8MM and BF16. macOS has a number of each name. Other systems are not asked.
inline bool has_feature(const char* name) {
#if defined(__linux__)
  if (!std::strcmp(name, "DotProd")) return getauxval(AT_HWCAP) >> 20 & 1;
  if (!std::strcmp(name, "I8MM")) return getauxval(AT_HWCAP2) >> 13 & 1;
  if (!std::strcmp(name, "BF16")) return getauxval(AT_HWCAP2) >> 14 & 1;
#elif defined(__APPLE__)
  char key[64] = "hw.optional.arm.FEAT_";
  std::strncat(key, name, sizeof key - std::strlen(key) - 1);
  int has = 0;
  size_t bytes = sizeof has;
  if (sysctlbyname(key, &has, &bytes, nullptr, 0) == 0) return has != 0;
#endif
  return false;
}

#define TWOFOUR_ON_arm(...) __VA_ARGS__
#else
#define TWOFOUR_ON_arm(...)
#endif
#define TWOFOUR_ON_any(...) __VA_ARGS__

// The sets of this architecture.
struct InstructionSet {
  const char *name, *level, *parents;  // parents: names with a space between
  bool measured;
  bool (*test)();                      // given that the CPU runs the parents
};

constexpr InstructionSet kInstructionSets[] = {
#define TWOFOUR_ISA(name, architecture, level, parents, flags, measured, test) \
  TWOFOUR_ON_##architecture({#name, #level, parents, measured, [] { return bool{test}; }}, )
#include "isa.def"
#undef TWOFOUR_ISA
};
#undef CPU
#undef TWOFOUR_ON_any
#undef TWOFOUR_ON_arm
#undef TWOFOUR_ON_x86

// Whether this CPU and operating system run the instruction set of that name, `length` letters.
inline bool cpu_has(const char* name, size_t length) {
#ifdef TWOFOUR_X86
  __builtin_cpu_init();
#endif
  for (const InstructionSet& set : kInstructionSets) {
    if (std::strlen(set.name) != length || std::memcmp(set.name, name, length) != 0) continue;
    for (const char* parent = set.parents; *parent != '\0';) {
      const size_t letters = std::strcspn(parent, " ");
      if (!cpu_has(parent, letters)) return false;
      parent += letters + (parent[letters] == ' ');
    }
    return set.test();
  }
  return false;
}
inline bool cpu_has(const char* name) { return cpu_has(name, std::strlen(name)); }

}  // namespace twofour
