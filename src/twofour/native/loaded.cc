// Functions of loaded libraries, as each system looks them up.
#include "native/loaded.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

// glibc 2.34 moved these two from libdl to libc and gave them a new version; under the old one every glibc has them, so
// what a newer system links runs on an older one too.
#if defined(__GLIBC__)
#if __GLIBC_PREREQ(2, 34)
#if defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5\n.symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.17\n.symver dlsym, dlsym@GLIBC_2.17");
#endif
#endif
#endif

namespace twofour {

#ifdef _WIN32
void* loaded_function(const char* name, const char*) {
  const HMODULE torch = GetModuleHandleW(L"torch_cpu.dll");
  return torch ? reinterpret_cast<void*>(GetProcAddress(torch, name)) : nullptr;
}
#else
void* loaded_function(const char* name, const char* library) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  void* opened = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return opened ? dlsym(opened, name) : nullptr;
}
#endif

}  // namespace twofour
