// The tables of kernels: what every row says, whatever its operation. A family's .inc file holds its rows, one line each,
//
//   TWOFOUR_ROW(symbol, isa, pattern, dtype, layout, least, most)
//
// those of an architecture between #ifdef and #endif. The family's header declares the symbols from it and its bind.cc
// makes the array; Python sees all tables as one (native.rows) and selects by the fields.
//
// A source whose functions are written TWOFOUR_HERE(symbol without its isa) is compiled once for each instruction set that
// the table has such a row of and that has no source of its own beside it: CMakeLists.txt defines TWOFOUR_SET.
#pragma once

#include <cstdint>

#define TWOFOUR_JOIN(name, set, suffix) name##__##set##suffix
#define TWOFOUR_EXPAND(name, set, suffix) TWOFOUR_JOIN(name, set, suffix)
#define TWOFOUR_HERE(name) TWOFOUR_EXPAND(name, TWOFOUR_SET, )
#define TWOFOUR_WORKSPACE_HERE(name) TWOFOUR_EXPAND(name, TWOFOUR_SET, __workspace)

namespace twofour {

constexpr int64_t kMost = int64_t{1} << 30;  // no bound on tokens

struct RowBase {
  const char* name;  // the symbol: <operation>_<pattern>_<dtype>_<design>__<isa>; nothing is read from it
  const char* operation;
  const char* isa;      // a row of isa.def; ask the CPU before anything of the row is called
  const char* pattern;  // of the weights: "2:4", "any" for every N:M, "dense" where none
  const char* dtype;    // computing type, or the encoding of the weight as packing/header.py names it
  const char* layout;   // order of the weight's bytes, "" where the operation has none
  int64_t least, most;  // tokens for which it is worth measuring; it is correct for any
};

// A row whose operation is one function.
template <class Run>
struct KernelRow : RowBase {
  Run* run;
};

}  // namespace twofour
