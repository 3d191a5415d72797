// What newer headers of libstdc++ call and its older libraries lack. With it the extension asks for nothing newer than
// GCC 7's library has, whatever GCC compiled it; tests/test_linked.py holds that.
#include <new>

#ifdef __GLIBCXX__
// std::__throw_bad_array_new_length(), of GCC 11 (GLIBCXX_3.4.29). Weak: some compilers for older systems bring their own.
extern "C" [[noreturn]] __attribute__((weak, visibility("hidden"))) void _ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}
#endif
