// Masks for Python.
#include <cstdlib>
#include <cstring>

#include "fill_pruned.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_groups.h"
#include "nm_mask.h"
#include "nm_nonzero.h"
#include "nm_ties.h"
#include "nm_tiles.h"

namespace nb = nanobind;

namespace twofour {
namespace {

// Whether a row is for that pattern.
bool takes(const RowBase& row, int n, int group) {
  const char* colon = std::strchr(row.pattern, ':');
  return colon == nullptr || (std::atoi(row.pattern) == n && std::atoi(colon + 1) == group);
}

// Bytes of a value, of a row whose dtype is a number of bits.
int width(const RowBase& row) { return std::atoi(row.dtype) / 8; }

constexpr NmMaskKernel kNmMaskKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_mask", __VA_ARGS__}, symbol},
#include "nm_mask.inc"
#undef TWOFOUR_ROW
};

constexpr NmTilesKernel kNmTilesKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_tiles", __VA_ARGS__}, symbol},
#include "nm_tiles.inc"
#undef TWOFOUR_ROW
};

constexpr NmNonzeroKernel kNmNonzeroKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_nonzero", __VA_ARGS__}, symbol},
#include "nm_nonzero.inc"
#undef TWOFOUR_ROW
};

constexpr NmTiesKernel kNmTiesKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_ties", __VA_ARGS__}, symbol},
#include "nm_ties.inc"
#undef TWOFOUR_ROW
};

void bind_nm_tiles(nb::module_& m) {
  bind_table(m, kNmTilesKernels);
  m.def("nm_tiles", [](int index, const Operand& scores, const Operand& keep, bool absolute, int threads) {
    const NmTilesKernel& kernel = row(kNmTilesKernels, index);
    const Border border(kernel.name);
    const View from = border.dense(scores, "scores", {Type::f32});
    const View to = border.exactly(keep, "mask", {Type::boolean}, from.count());
    const int64_t count = from.count(), rows = from.ndim > 0 ? from.shape[0] : 0, columns = rows ? count / rows : 0;
    border.require(rows % 4 == 0 && columns % 4 == 0, scores, "scores", "rows and columns in multiples of 4");
    bool finite = true;
    const Unlocked unlocked;
    const int64_t grain = 1 + 4096 / (columns + 1);  // below 16384 values, starting a thread costs more than the search
    parallel_for(rows / 4, grain, threads, [&](int64_t begin, int64_t end) {
      const NmTiles part{reinterpret_cast<const float*>(from.data) + 4 * begin * columns,
                         reinterpret_cast<uint8_t*>(to.data) + 4 * begin * columns, end - begin, columns, absolute};
      if (!kernel.run(part)) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    });
    return finite;
  });
}

NmNonzeroCounts nonzero(const NmNonzeroKernel& kernel, const char* values, char* bits, int64_t count,
                        int64_t magnitude, int64_t finite, int threads) {
  NmNonzeroCounts found = {};
  const int each = width(kernel);
  // 65536 values a share, a multiple of 8: shares write bytes of their own.
  parallel_for(count, 65536, threads, [&](int64_t begin, int64_t end) {
    const NmNonzeroCounts part = kernel.run({reinterpret_cast<const uint8_t*>(values) + begin * each,
                                             reinterpret_cast<uint8_t*>(bits) + begin / 8, end - begin, magnitude, finite});
    __atomic_fetch_add(&found.nonzero, part.nonzero, __ATOMIC_RELAXED);
    __atomic_fetch_add(&found.negative, part.negative, __ATOMIC_RELAXED);
    __atomic_fetch_add(&found.broken, part.broken, __ATOMIC_RELAXED);
  });
  return found;
}

void require_groups(int64_t length, int n, int group) {
  if (group < 2 || group > kNmGroupsLargest || n < 1 || n >= group) throw std::invalid_argument("no such N:M");
  if (length % group != 0) throw std::invalid_argument("the length is no multiple of the group");
}

void bind_nm_nonzero(nb::module_& m) {
  bind_table(m, kNmNonzeroKernels);
  // `bits`: one of every value of a weight; those of `values` begin at `first`, a multiple of 8.
  m.def("nm_nonzero", [](int index, const Operand& values, const Operand& bits, int64_t first, int64_t magnitude,
                         int64_t finite, int threads) {
    const NmNonzeroKernel& kernel = row(kNmNonzeroKernels, index);
    const Border border(kernel.name);
    const View from = border.dense(values, "values", kAnyType), to = border.dense(bits, "bits", {Type::u8});
    const int64_t count = from.count();
    border.require(from.width == width(kernel), values, "values", std::to_string(width(kernel)) + " bytes a value");
    border.require(first >= 0 && first % 8 == 0 && first / 8 <= to.count() && (count + 7) / 8 <= to.count() - first / 8,
                   bits, "bits", "a bit for every value");
    NmNonzeroCounts found;
    {
      const Unlocked unlocked;
      found = nonzero(kernel, from.data, to.data + first / 8, count, magnitude, finite, threads);
    }
    return nb::make_tuple(found.nonzero, found.negative, found.broken);
  });
  m.def("nm_groups", [](const Operand& bits, int64_t outer, int64_t length, int64_t inner, int n, int group, bool pairs,
                        bool stop) {
    require_groups(length, n, group);
    if (pairs && (n % 2 != 0 || group % 2 != 0)) throw std::invalid_argument("pairs take an even N:M");
    const Border border("nm_groups");
    const View from = border.dense(bits, "bits", {Type::u8});
    int64_t count;
    const bool sane = outer >= 0 && length >= 0 && inner >= 0 && !__builtin_mul_overflow(outer, length, &count) &&
                      !__builtin_mul_overflow(count, inner, &count);
    border.require(sane && count / 8 + (count % 8 != 0) + 8 <= from.count(), bits, "bits",
                   "a bit for every value and 8 bytes more");
    NmGroupsFound found;
    {
      const Unlocked unlocked;
      found = nm_groups({reinterpret_cast<const uint8_t*>(from.data), outer, length, inner, n, group, pairs, stop});
    }
    return nb::make_tuple(found.offending, found.spare, found.first);
  });
  bind_table(m, kNmTiesKernels);
  m.def("nm_ties", [](int index, const Operand& values, int sign, int64_t outer, int64_t length, int64_t inner, int n,
                      int group) {
    const NmTiesKernel& kernel = row(kNmTiesKernels, index);
    require_groups(length, n, group);
    if (!takes(kernel, n, group)) throw std::invalid_argument("the row is of another N:M");
    if (sign < 0 || sign > 2) throw std::invalid_argument("no such sign");
    const Border border(kernel.name);
    const View from = border.dense(values, "values", kAnyType);
    border.require(from.width == width(kernel) && product_is(from.count(), outer, length, inner), values, "values",
                   std::to_string(width(kernel)) + " bytes a value, outer * length * inner of them");
    if (from.count() == 0) return int64_t{0};  // one size of zero, whatever the others say
    const Unlocked unlocked;
    return kernel.run({from.data, static_cast<Sign>(sign), outer, length, inner, n, group});
  });
}

void bind_fill_pruned(nb::module_& m) {
  // In place: `values` of 2 or 4 bytes each, of which `keep` has a byte.
  m.def("fill_pruned", [](const Operand& values, const Operand& keep, int threads) {
    const Border border("fill_pruned");
    const View at = border.dense(values, "values", kReal), mask = border.exactly(keep, "mask", {Type::boolean}, at.count());
    const Unlocked unlocked;
    const auto* bytes = reinterpret_cast<const uint8_t*>(mask.data);
    parallel_for(at.count(), 65536, threads, [&](int64_t begin, int64_t end) {
      if (at.type == Type::bf16) fill_pruned(reinterpret_cast<uint16_t*>(at.data) + begin, bytes + begin, end - begin);
      else fill_pruned(reinterpret_cast<uint32_t*>(at.data) + begin, bytes + begin, end - begin);
    });
  });
}

}  // namespace

void bind_nm_mask(nb::module_& m) {
  bind_fill_pruned(m);
  bind_table(m, kNmMaskKernels);
  m.def("nm_mask", [](int index, const Operand& scores, const Operand& keep, int n, int group, bool absolute,
                      int threads) {
    const NmMaskKernel& kernel = row(kNmMaskKernels, index);
    if (group < 1 || group > kNmMaskMaxGroup || n < 1 || n > group) throw std::invalid_argument("no such N:M");
    if (!takes(kernel, n, group)) throw std::invalid_argument("the row is of another N:M");
    const Border border(kernel.name);
    const View from = border.dense(scores, "scores", {Type::f32});
    const View to = border.exactly(keep, "mask", {Type::boolean}, from.count());
    border.require(from.count() % group == 0, scores, "scores", "groups of " + std::to_string(group));
    bool finite = true;
    const Unlocked unlocked;
    // 1024 groups a share: below that, starting a thread costs more than the mask.
    parallel_for(from.count() / group, 1024, threads, [&](int64_t begin, int64_t end) {
      const NmMask part{reinterpret_cast<const float*>(from.data) + begin * group,
                        reinterpret_cast<uint8_t*>(to.data) + begin * group, end - begin, n, group, absolute};
      if (!kernel.run(part)) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    });
    return finite;
  });
  bind_nm_tiles(m);
  bind_nm_nonzero(m);
}

}  // namespace twofour
