#include "nonzero_words.h"

namespace twofour {
namespace {

template <class Value>
NmNonzeroCounts run(const NmNonzero& a) {
  const auto magnitude = static_cast<Value>(a.magnitude), finite = static_cast<Value>(a.finite);
  return nonzero_words<Value>(a, [=](const Value* values) {
    NonzeroWords w = {};
    for (int i = 0; i < 64; ++i) {
      const auto size = static_cast<Value>(values[i] & magnitude);
      w.nonzero |= static_cast<uint64_t>(size != 0) << i;
      w.negative |= static_cast<uint64_t>(size == 0 && values[i] != 0) << i;
      w.broken |= static_cast<uint64_t>(size > finite) << i;
    }
    return w;
  });
}

}  // namespace

NmNonzeroCounts nm_nonzero_b8__scalar(const NmNonzero& a) { return run<int8_t>(a); }
NmNonzeroCounts nm_nonzero_b16__scalar(const NmNonzero& a) { return run<int16_t>(a); }
NmNonzeroCounts nm_nonzero_b32__scalar(const NmNonzero& a) { return run<int32_t>(a); }
NmNonzeroCounts nm_nonzero_b64__scalar(const NmNonzero& a) { return run<int64_t>(a); }

}  // namespace twofour
