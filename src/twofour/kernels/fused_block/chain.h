// Steps of a fused block that run as one pass: what they hand to each other stays in vector registers. They are read
// once for a group of vectors, so that rows shorter than a group share one. Internal linkage.
#pragma once

#include <type_traits>

#include "ahead.h"
#include "fused_block.h"
#include "kernels/precise_math.h"
#include "row_numbers.h"

namespace {

// The row of each vector of a tile of whole vectors a row.
template <class V>
class RowOfVector {
 public:
  const int16_t* of(int64_t vectors_a_row) {
    if (vectors_a_row != vectors_a_row_)
      for (int64_t i = 0; i < kVectors; i++) rows_[i] = static_cast<int16_t>(i / vectors_a_row);
    vectors_a_row_ = vectors_a_row;
    return rows_;
  }

 private:
  static constexpr int64_t kVectors = twofour::kMostTile / V::width;
  int64_t vectors_a_row_ = 0;
  int16_t rows_[kVectors];
};

// Numbers of a register where they stand: as floats, or as an operand of bfloat16 has them.
struct Places {
  const float* floats = nullptr;
  const uint16_t* halves = nullptr;
  bool repeats = false;  // every row of the tile has the same: the first ones are read again, which stay in the cache
};

template <class V>
class Chain {
  using M = PreciseMath<V>;
  using F = typename V::reg;
  using StepOp = twofour::StepOp;
  static constexpr int kGroup = 8;  // vectors; sixteen were measured to be no faster

 public:
  // Where the result of a link goes, else than to the next one.
  struct Target {  // without defaults: a pass would write those of all links
    float* floats;
    uint16_t* halves;
    bool stream;
  };
  // The second operand of a link: the one number there is, one for each place, or one for each row of a group's.
  enum Second { of_all, of_floats, of_halves, of_row };
  // A step and its second operand as one number, which the code of a link is chosen by.
  static constexpr int code_of(StepOp op, Second second) { return static_cast<int>(op) * 4 + second; }
  struct Link {
    int code;
    float value;
    const void* second;
    Target to;
    bool writes, repeats;
  };

  // Over `rows` rows of `width` numbers from `from` on. Rows are whole vectors, or there are no links of rows.
  Chain(Places from, int64_t rows, int64_t width, RowOfVector<V>& row_of, Ahead& ahead)
      : repeats_(from.repeats), from_(from), rows_(rows), width_(width), row_of_(row_of), ahead_(ahead) {}
  void add(StepOp op, Places places, const float* of_rows, float value, Target to) {
    Link& link = links_[count_++];  // field by field: a whole one would be read back before it is written
    link.code = code_of(op, of_rows ? of_row : places.floats ? of_floats : places.halves ? of_halves : of_all);
    link.second = of_rows ? of_rows : places.floats ? static_cast<const void*>(places.floats) : places.halves;
    link.value = value, link.writes = to.floats || to.halves, link.repeats = places.repeats;
    link.to.floats = to.floats, link.to.halves = to.halves, link.to.stream = to.stream;
    of_rows_ |= of_rows != nullptr, repeats_ |= places.repeats;
  }

  void run() {
    const bool long_rows = width_ >= kGroup * V::width, whole = width_ % V::width == 0;
    if (of_rows_ ? rows_ == 1 || long_rows : repeats_ && long_rows && whole) return by_row([](const auto&) {});
    if (of_rows_) shared_ = row_of_.of(width_ / V::width);
    share_groups();
    through(0, rows_ * width_, [](const auto&) {});
  }

  // `reads_on`: memory is asked for what stands behind what is read. Nothing is written that would wait for the same.
  void reduce(RowNumbers<V>& to, bool reads_on) {
    reads_on_ = reads_on;
    switch (width_) {
      case V::width: return reduce_short<1>(to);
      case 2 * V::width: return reduce_short<2>(to);
      case 4 * V::width: return reduce_short<4>(to);
      case 8 * V::width: return reduce_short<8>(to);
      default: return reduce_rows(to);
    }
  }

 private:
  // take(vectors) gets what the last link makes of a group.
  template <class Take>
  TWOFOUR_INLINE void by_row(const Take& take) {
    begin_rows();
    for (int64_t r = 0; r < rows_; r++) row(r, take);
  }
  // Links of rows take one number then, which each row puts there.
  void begin_rows() {
    for (int i = 0; of_rows_ && i < count_; i++)
      if ((by_row_[i] = links_[i].code % 4 == of_row)) links_[i].code += of_all - of_row;
  }
  // Where whole rows make up a group, what every row has is the same for every group.
  void share_groups() {
    if (kGroup * V::width % width_ == 0) within_ = kGroup * V::width - 1;
  }
  template <class Take>
  TWOFOUR_INLINE void row(int64_t r, const Take& take) {
    begin_ = r * width_;
    for (int i = 0; of_rows_ && i < count_; i++)
      if (by_row_[i]) links_[i].value = static_cast<const float*>(links_[i].second)[r];
    through(r * width_, (r + 1) * width_, take);
  }
  template <class Take>
  TWOFOUR_INLINE void through(int64_t at, int64_t end, const Take& take) {
    for (; at + kGroup * V::width <= end; at += kGroup * V::width) group<kGroup>(at, take);
    if (at + 4 * V::width <= end) group<4>(at, take), at += 4 * V::width;
    if (at + 2 * V::width <= end) group<2>(at, take), at += 2 * V::width;
    for (; at < end; at += V::width) group<1>(at, take);
  }

  // Four sums at a time hide the latency of one, and sum more exactly.
  void reduce_rows(RowNumbers<V>& to) {
    begin_rows();
    reduction<V>(to.op(), [&](float first, const auto& of) {
      for (int64_t r = 0; r < rows_; r++) {
        F sums[4] = {M::all(first), M::all(first), M::all(first), M::all(first)};
        row(r, [&](const auto& x) {
          constexpr int n = sizeof x / sizeof(F);
          TWOFOUR_UNROLL
          for (int k = 0; k < n; k++) sums[k % 4] = of(sums[k % 4], x[k]);
        });
        to.put(of(of(sums[0], sums[1]), of(sums[2], sums[3])));
      }
    });
  }
  // Rows of so many vectors, several in a group.
  template <int kVectors>
  void reduce_short(RowNumbers<V>& to) {
    shared_ = row_of_.of(kVectors);
    share_groups();
    through(0, rows_ * width_, [&](const auto& x) {
      constexpr int n = sizeof x / sizeof(F);
      if constexpr (n >= kVectors)
        reduction<V>(to.op(), [&](float, const auto& of) {
          TWOFOUR_UNROLL
          for (int k = 0; k < n; k += kVectors) {
            if constexpr (kVectors == 8)
              to.put(of(of(of(x[k], x[k + 1]), of(x[k + 2], x[k + 3])), of(of(x[k + 4], x[k + 5]), of(x[k + 6], x[k + 7]))));
            else if constexpr (kVectors == 4) to.put(of(of(x[k], x[k + 1]), of(x[k + 2], x[k + 3])));
            else if constexpr (kVectors == 2) to.put(of(x[k], x[k + 1]));
            else to.put(x[k]);
          }
        });
    });
  }

  // One group of vectors through all links. Each place is one pointer and a constant: of a sum of three numbers gcc keeps
  // eight in registers that it does not have.
  template <int kVectors, class Take>
  TWOFOUR_INLINE void group(int64_t at, const Take& take) {
    F x[kVectors];
    const int64_t again = (at - begin_) & within_;
    if (from_.halves) first(from_.halves + at, x);
    else first(from_.floats + (from_.repeats ? again : at), x);
    for (const Link *link = links_, *end = links_ + count_; link < end; link++) {
      switch (link->code) {
#define TWOFOUR_CASE(name, result, of)                                                               \
  case code_of(StepOp::name, of):                                                                    \
    with_second<of, kVectors>(*link, link->repeats ? again : at, [&](const auto& second) __attribute__((always_inline)) {    \
      TWOFOUR_UNROLL                                                                                 \
      for (int k = 0; k < kVectors; k++) {                                                           \
        const F a = x[k];                                                                            \
        [[maybe_unused]] const F b = second(k);                                                      \
        x[k] = result;                                                                               \
      }                                                                                              \
    });                                                                                              \
    break;
#define TWOFOUR_LINK(name, result)       \
  TWOFOUR_CASE(name, result, of_all)     \
  TWOFOUR_CASE(name, result, of_floats)  \
  TWOFOUR_CASE(name, result, of_halves)  \
  TWOFOUR_CASE(name, result, of_row)
#include "links.def"
#undef TWOFOUR_CASE
        default:
          break;
      }
      if (!link->writes) continue;
      if (link->to.floats) put(link->to.floats + at, x, link->to.stream);
      else put(link->to.halves + at, x, link->to.stream);
    }
    take(x);
    ahead_.after(kVectors * V::width);
  }
  template <class T, int kVectors>
  TWOFOUR_INLINE void first(const T* from, F (&x)[kVectors]) const {
    TWOFOUR_UNROLL
    for (int k = 0; k < kVectors; k++) x[k] = V::load_unaligned(from + k * V::width);
    read_on<kVectors>(from);
  }
  template <int kVectors>
  static TWOFOUR_INLINE void put(float* to, const F (&x)[kVectors], bool stream) {
    if (stream) {
      TWOFOUR_UNROLL
      for (int k = 0; k < kVectors; k++) V::stream(to + k * V::width, x[k]);
    } else {
      TWOFOUR_UNROLL
      for (int k = 0; k < kVectors; k++) V::store_unaligned(to + k * V::width, x[k]);
    }
  }
  // Two vectors to bfloat16 are one: half as many stores, each of a whole line where vectors are. A row of an odd count
  // of vectors ends in the middle of one: the next row is not streamed.
  template <int kVectors>
  static TWOFOUR_INLINE void put(uint16_t* to, const F (&x)[kVectors], bool stream) {
    constexpr std::make_integer_sequence<int, 2 * V::width> all{};
    if constexpr (kVectors == 1) return V::store_unaligned(to, x[0]);
    stream &= reinterpret_cast<uintptr_t>(to) % V::streamed == 0;
    TWOFOUR_UNROLL
    for (int k = 0; k + 1 < kVectors; k += 2) {
      const F pair = M::upper_words(V::to_upper(x[k]), V::to_upper(x[k + 1]), all);
      auto* at = reinterpret_cast<float*>(to + k * V::width);
      if (stream) V::stream(at, pair);
      else V::store_unaligned(at, pair);
    }
  }
  // The prefetchers of a core stop at the end of a page of 4 KB, which a tile reaches every time.
  template <int kVectors, class T>
  TWOFOUR_INLINE void read_on(const T* at) const {
    constexpr int kFar = 2048, kLine = 64;  // bytes; measured: 1,024 is as good, 3,072 is worse
    if (kVectors < kGroup || !reads_on_) return;
    const char* bytes = reinterpret_cast<const char*>(at) + kFar;
    TWOFOUR_UNROLL
    for (int k = 0; k < static_cast<int>(kVectors * V::width * sizeof(T)); k += kLine) __builtin_prefetch(bytes + k, 0, 2);
  }
  // Calls use(second) with the second operand of each vector of a group.
  template <Second of, int kVectors, class Use>
  TWOFOUR_INLINE void with_second(const Link& link, int64_t at, const Use& use) const {
    if constexpr (of == of_floats || of == of_halves) {
      using T = std::conditional_t<of == of_floats, float, uint16_t>;
      const T* places = static_cast<const T*>(link.second) + at;
      read_on<kVectors>(places);
      use([&](int k) { return V::load_unaligned(places + k * V::width); });
    } else if constexpr (of == of_row) {
      const int16_t* rows = shared_ + at / V::width;
      const float* of_rows = static_cast<const float*>(link.second);
      if (kVectors == kGroup && width_ == kGroup / 2 * V::width) {  // two rows a group
        const F halves[2] = {V::broadcast(of_rows + rows[0]), V::broadcast(of_rows + rows[kGroup / 2])};
        use([&](int k) { return halves[k / (kGroup / 2)]; });
      } else {
        use([&](int k) { return V::broadcast(of_rows + rows[k]); });
      }
    } else {
      const F b = V::broadcast(&link.value);
      use([&](int) { return b; });
    }
  }

  Link links_[twofour::kMostChain];
  int count_ = 0;
  bool of_rows_ = false, repeats_, by_row_[twofour::kMostChain];
  Places from_;
  int64_t rows_, width_;
  RowOfVector<V>& row_of_;
  int64_t begin_ = 0, within_ = -1;  // of what repeats: the row's first place, and which bits of a place count from there
  const int16_t* shared_ = nullptr;  // where rows share groups, the row of each vector
  Ahead& ahead_;
  bool reads_on_ = false;
};

}  // namespace
