// Convolutions by tables: the 64 sums of 6 codes of a pixel that 6 bits of a weight can pick are looked up, for 64 bytes by
// one vpermb. A pixel's tables serve every window that reads it, every output and every plane of the weight. Sums of lookups
// stay bytes as long as they fit, then 16 bits. Codes of an answer are compared in 16 bits too where all sums fit them.
// Included by AVX-512 sources with VBMI; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../six_sums.h"
#include "conv.h"
#include "lookup_order.h"
#include "lookup_tile.h"

namespace {

using twofour::kLookupsPanel;

constexpr int64_t kChunkTables = 384 << 10;  // bytes of the tables of a chunk of rows, which stay in L2
constexpr int64_t kBlockPixels = 32;         // whose sums of 16 bits stay in L1 while all inputs pass
constexpr int64_t kSegmentBytes = 26 << 10;  // of the weights that pass together: they stay in L1 for a block
constexpr int64_t kWholeSegment = 96;        // groups whose sums of two planes 16 bits hold, whatever the codes

// How the planes of a weight are paired: vectors of two planes of 32 outputs, then of the last plane of 64 where it is alone.
struct LookupPlanes {
  int64_t bits, pairs;
  int32_t top;  // what the last plane counts
  alignas(64) int16_t weights[4][32];  // of the two planes of a pair

  explicit LookupPlanes(const BitsHead& head)
      : bits(head.bits), pairs(head.bits / 2), top(twofour::top_plane(head)) {
    for (int64_t p = 0; pairs > 0 && p < 4; p++) {  // of two bits all are alike: those of some panels
      const bool last = p % pairs == pairs - 1 && bits % 2 == 0;
      const int32_t second = last ? top / (1 << (bits - 2)) : 2;
      for (auto& both : weights[p]) both = static_cast<int16_t>(static_cast<uint32_t>(second) << 8 | 1);
    }
  }
  bool single() const { return bits % 2 != 0; }
  int64_t vectors() const { return bits; }                      // of a panel
  int64_t slots() const { return 2 * (pairs + (single() ? 1 : 0)); }  // of sums of a panel, 32 outputs each
};

struct LookupTiles {
  using V = WholeLanes;
  static constexpr bool planes = false;
  static constexpr int64_t panel = kLookupsPanel, inputs = kTablesInputs;
  static constexpr const char* layout = "bits_lookups";

  const BitsHead& head;
  LookupPlanes of;
  explicit LookupTiles(const BitsConv& a) : head(*static_cast<const BitsHead*>(a.weight)), of(head) {}

  static int64_t step(const PixelCodes& in) { return ceil_div(in.channels, kTablesInputs); }
  static bool gathered(const BitsConv&) { return false; }
  // Rows of the padded image that windows of so many rows of outputs read.
  static int64_t rows_read(const BitsConv& a, int64_t rows) {
    return (rows - 1) * a.height.stride + (a.height.taps - 1) * a.height.dilation + 1;
  }
  static int64_t rows(const BitsConv& a, int64_t wide) {
    const int64_t fit = kChunkTables / (wide * ceil_div(a.in_channels, kTablesInputs) * 64) - rows_read(a, 1);
    return fit <= 0 ? 1 : fit / a.height.stride + 1;
  }
  // Thresholds of 16 bits, then tables.
  static int64_t narrow(const BitsConv& a, const ConvPlan& plan) { return round_up((a.answer.most + 1) * plan.padded * 2, 64); }
  static int64_t scratch(const BitsConv& a, const ConvPlan& plan) {
    return narrow(a, plan) + rows_read(a, plan.rows) * plan.wide * plan.step * 64;
  }
  // Where the tables of a window stand behind its first one, in bytes, in the order of the weight (lookup_order).
  static void places(const BitsConv& a, const ConvPlan& plan, int32_t* to) {
    lookup_order(a.height.taps, a.width.taps, plan.step, [&](int64_t y, int64_t x, int64_t q) {
      *to++ = static_cast<int32_t>(((y * a.height.dilation * plan.wide + x * a.width.dilation) * plan.step + q) * 64);
    });
  }
  // Whether 16 bits hold every sum of values and of stored codes, and one more than the greatest.
  bool fits_words(const BitsConv& a, const ConvPlan& plan) const {
    const int64_t codes = (int64_t{1} << head.bits) - 1, top = head.alpha * codes + head.beta, low = -head.beta;
    const int64_t stored = of.top < 0 ? -of.top : codes > top ? codes : top;
    return plan.taps * a.in_channels * (stored > low ? stored : low) * a.quantization.x_most <= 32766;
  }
  // Pixels of a block: whole tiles of 3 and 6, or of 2, 4 and 8.
  int64_t block() const { return of.pairs > 0 ? 30 : kBlockPixels; }
  // Panels that are computed together.
  int64_t panels() const { return head.bits >= 3 ? 1 : head.bits == 1 ? 4 : 2; }
  // Groups of inputs that are: whole blocks of lookup_order where they fit.
  static int64_t segment(const BitsConv& a, const ConvPlan& plan, int64_t vectors, bool narrow) {
    const int64_t groups = plan.taps * plan.step, fit = kSegmentBytes / (kLookupsPanel * least(vectors, 4));
    const int64_t most = narrow ? fit : least(fit, kWholeSegment), block = lookup_block(a.width.taps, plan.step);
    const int64_t blocks = most / (block * a.width.taps);
    return least(groups, blocks < 1 ? most : blocks * block * a.width.taps);
  }
};

// Thresholds clamped to 16 bits: what no sum reaches stays so. Outputs that there are not reach none.
inline void narrow_thresholds(const BitsConv& a, const ConvPlan& plan, int16_t* to) {
  for (int64_t l = 0; l <= a.answer.most; l++)
    for (int64_t o = 0; o < plan.padded; o++) {
      const int32_t v = a.answer.numbers[l * plan.padded + o];
      const int32_t held = v > 32767 ? 32767 : v < -32768 ? -32768 : v;
      *to++ = static_cast<int16_t>(o < a.out_channels ? held : l == 0 ? 0 : 32767);
    }
}

// Sums of a pixel and a panel over all planes, two vectors of 32 outputs, modulo 2^16. `Bits`: of the weight, 0 where they vary.
template <int Bits>
TWOFOUR_INLINE void plane_sums(const LookupPlanes& of, const uint16_t* from, __m512i (&both)[2]) {
  const int64_t pairs = Bits > 0 ? Bits / 2 : of.pairs;
  const bool single = Bits > 0 ? Bits % 2 != 0 : of.single();
  TWOFOUR_UNROLL
  for (int h = 0; h < 2; h++) {
    const uint16_t* slot = from + 32 * h;
    __m512i sum = _mm512_load_si512(slot);
    if (pairs == 0) {
      both[h] = sum;
      continue;
    }
    for (int64_t p = 1; p < pairs; p++)
      sum = _mm512_add_epi16(sum, _mm512_sll_epi16(_mm512_load_si512(slot + p * 64), _mm_cvtsi64_si128(2 * p)));
    if (single) {
      const __m512i times = _mm512_set1_epi16(static_cast<int16_t>(of.top));
      sum = _mm512_add_epi16(sum, _mm512_mullo_epi16(_mm512_load_si512(slot + pairs * 64), times));
    }
    both[h] = sum;
  }
}

// Sums in 32 bits of the pixels of a block and a panel, as ConvFinish reads them.
struct WholeSums {
  alignas(64) int32_t of[4][kBlockPixels][16];
};

// Sums of 16 bits of `count` pixels, `stride` numbers apart, to 32 bits: the first, or added.
inline void widen_sums(const LookupPlanes& of, const uint16_t* from, int64_t stride, int64_t count, bool first, WholeSums* to) {
  for (int64_t i = 0; i < count; i++, from += stride) {
    __m512i all[4] = {};
    const auto add = [&](const uint16_t* slot, int32_t times) {
      TWOFOUR_UNROLL
      for (int v = 0; v < 4; v++) {
        const __m256i part = _mm256_load_si256(reinterpret_cast<const __m256i*>(slot) + v);
        all[v] = _mm512_add_epi32(all[v], _mm512_mullo_epi32(_mm512_cvtepi16_epi32(part), _mm512_set1_epi32(times)));
      }
    };
    for (int64_t p = 0; p < of.pairs; p++) add(from + p * 64, 1 << 2 * p);
    if (of.single()) add(from + of.pairs * 64, of.pairs == 0 ? 1 : of.top);
    TWOFOUR_UNROLL
    for (int v = 0; v < 4; v++) {
      int32_t* sum = to->of[v][i];
      _mm512_store_si512(sum, first ? all[v] : _mm512_add_epi32(_mm512_load_si512(sum), all[v]));
    }
  }
}

// From sums of lookups of a pixel and panel to its answer.
struct LookupFinish {
  const BitsConv& a;
  const ConvPlan& plan;
  const BitsWeight& w;
  const LookupPlanes& of;
  const Chunk& chunk;
  const int16_t* thresholds;  // null: in 32 bits
  ConvFinish<WholeLanes> whole;

  static TWOFOUR_INLINE __m512i all(uint32_t v) { return _mm512_set1_epi16(static_cast<int16_t>(v)); }
  // Codes of 64 outputs. 16 bits are enough for the values of sums: all is modulo 2^16 until then. `Most`: of a code, 0 where
  // it varies. What is read is held in locals: a store of bytes may change whatever memory holds.
  template <int Bits, int Most>
  TWOFOUR_NOINLINE void codes(const uint16_t* from, int64_t stride, int64_t place, int64_t count, int64_t row) const {
    const auto factor = static_cast<uint32_t>(a.quantization.x_factor);
    const uint32_t times = factor * static_cast<uint32_t>(w.head.alpha);
    const uint32_t beside = factor * static_cast<uint32_t>(w.head.beta), zero = static_cast<uint32_t>(chunk.facts.range.zero);
    const int32_t most = Most > 0 ? Most : a.answer.most;
    const int64_t padded = plan.padded, step = plan.codes;
    const int16_t* numbers = thresholds + row;
    const OutputPixel* pixel = chunk.pixels + place;
    const __m512i one = _mm512_set1_epi16(1);
    uint8_t* to = chunk.codes + place * step + row;
    for (; count-- > 0; pixel++, to += step, from += stride) {
      __m512i both[2];
      plane_sums<Bits>(of, from, both);
      TWOFOUR_UNROLL
      for (int h = 0; h < 2; h++) {
        __m512i v = both[h];
        if (times != 1) v = _mm512_mullo_epi16(v, all(times));
        if (beside != 0) v = _mm512_add_epi16(v, all(beside * static_cast<uint32_t>(pixel->sum)));
        if (zero != 0) {
          const int32_t* inside = pixel->inside + row + 32 * h;
          const __m256i low = _mm512_cvtepi32_epi16(_mm512_loadu_si512(inside));
          const __m256i high = _mm512_cvtepi32_epi16(_mm512_loadu_si512(inside + 16));
          v = _mm512_sub_epi16(v, _mm512_mullo_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), all(zero)));
        }
        v = _mm512_xor_si512(v, _mm512_load_si512(numbers + 32 * h));
        __m512i code = _mm512_setzero_si512();
        for (int32_t l = 1; l <= most; l++) {
          const __mmask32 reached = _mm512_cmpge_epi16_mask(v, _mm512_load_si512(numbers + l * padded + 32 * h));
          code = _mm512_mask_add_epi16(code, reached, code, one);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * h), _mm512_cvtepi16_epi8(code));
      }
    }
  }
  // Real answers of 64 outputs, those of a pixel together. `Plain`: sums are the answers' own.
  template <int Bits, bool Plain>
  TWOFOUR_NOINLINE void reals(const uint16_t* from, int64_t stride, int64_t place, int64_t count, int64_t row) const {
    using Finish = ConvFinish<WholeLanes>;
    static constexpr auto nothing = [] {
      struct alignas(64) { float of[kLookupsPanel]; } line{};
      for (float& one : line.of) one = -0.0f;
      return line;
    }();
    const Finish::Reals answers[4] = {{a, w, row}, {a, w, row + 16}, {a, w, row + 32}, {a, w, row + 48}};
    const Finish::Vector at = whole.vector_at(row);
    const OutputPixel* pixel = chunk.pixels + place;
    const int64_t channels = a.out_channels, begin = (chunk.first + place) * channels + row, left = channels - row;
    const int64_t step = a.after.other == nullptr ? 0 : channels;
    const float* other = step == 0 ? nothing.of : chunk.other + begin;
    float* to = reinterpret_cast<float*>(chunk.answer) + begin;
    for (; count-- > 0; pixel++, from += stride, to += channels, other += step) {
      __m512i both[2];
      plane_sums<Bits>(of, from, both);
      TWOFOUR_UNROLL
      for (int v = 0; v < 4; v++) {
        if (left <= 16 * v) break;
        const __m256i part = v % 2 == 0 ? _mm512_castsi512_si256(both[v / 2]) : _mm512_extracti64x4_epi64(both[v / 2], 1);
        auto sum = (WholeLanes::I)_mm512_cvtepi16_epi32(part);
        if (!Plain) sum = Finish::whole(at, sum, pixel->sum, (WholeLanes::U)Finish::ints(pixel->inside + row + 16 * v) * at.zero);
        const auto added = WholeLanes::load(other + 16 * v, left - 16 * v);
        WholeLanes::store(to + 16 * v, answers[v].answer(sum, pixel->scale, added), left - 16 * v);
      }
    }
  }
  template <int Bits>
  void reals(const uint16_t* from, int64_t stride, int64_t place, int64_t count, int64_t row) const {
    const auto at = whole.vector_at(row);
    if (at.times == 1 && at.beside == 0 && at.zero == 0) reals<Bits, true>(from, stride, place, count, row);
    else reals<Bits, false>(from, stride, place, count, row);
  }
  // Sums of `count` pixels from `place` of the chunk on, and the panel whose first output is `row`.
  void operator()(const uint16_t* from, int64_t stride, int64_t place, int64_t count, int64_t row) const {
    const int64_t bits = of.bits, most = a.answer.most;
    if (thresholds == nullptr) {
      if (bits == 1) reals<1>(from, stride, place, count, row);
      else if (bits == 2) reals<2>(from, stride, place, count, row);
      else reals<0>(from, stride, place, count, row);
    } else if (bits == 1 && most == 1) {
      codes<1, 1>(from, stride, place, count, row);
    } else if (bits == 1 && most == 3) {
      codes<1, 3>(from, stride, place, count, row);
    } else if (bits == 2 && most == 3) {
      codes<2, 3>(from, stride, place, count, row);
    } else {
      codes<0, 0>(from, stride, place, count, row);
    }
  }
};

// Tables of the pixels that the windows of a chunk read, from row `first` of the padded image on.
inline void chunk_tables(const BitsConv& a, const ConvPlan& plan, int64_t first, int64_t rows, uint8_t* to) {
  const auto* codes = static_cast<const uint8_t*>(a.workspace) + plan.image + first * plan.wide * plan.pixel;
  tables_of_rows(codes, plan.pixel, rows * plan.wide, plan.step, to, plan.step * 64, 64);
}

// The tiles of some pixels and all vectors of some panels, for the groups of a segment. `sums`: of a pixel `stride` numbers.
inline void block_tiles(const LookupPlanes& of, const LookupPass& pass, int64_t panels, const uint8_t* const* pixels, int64_t count,
                        uint16_t* sums, int64_t stride) {
  LookupPass at = pass;
  const auto run = [&](LookupShape (*shape_of)(int64_t, int64_t), int64_t vectors, int64_t slots) {
    for (int64_t v = 0; v < vectors;) {
      int64_t done = 0;
      for (int64_t i = 0; i < count;) {
        const LookupShape shape = shape_of(count - i, vectors - v);
        shape.run(at, pixels + i, sums + i * stride, stride);
        i += shape.pixels, done = shape.vectors;
      }
      v += done, sums += done * slots * 32, at.weights += done * at.vector, at.planes += done / 2 * 32;
    }
  };
  if (of.bits == 1) return run(single_shape, panels, 2);
  if (of.bits == 2) return at.planes = of.weights[0], run(pair_shape, 2 * panels, 1);
  run(pair_shape, 2 * of.pairs, 1);
  if (of.single()) run(single_shape, 1, 2);
}

inline void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const LookupTiles& tiles, const Chunk& chunk,
                       char* scratch) {
  const int64_t first = chunk.first / a.width.output * a.height.stride, size = plan.step * 64;
  auto* tables = reinterpret_cast<uint8_t*>(scratch) + LookupTiles::narrow(a, plan);
  auto* narrowed = reinterpret_cast<int16_t*>(scratch);
  const LookupPlanes& of = tiles.of;
  const bool narrow = tiles.fits_words(a, plan), compared = narrow && chunk.codes != nullptr;
  if (compared) narrow_thresholds(a, plan, narrowed);
  else if (chunk.codes != nullptr) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  chunk_tables(a, plan, first, LookupTiles::rows_read(a, chunk.count / a.width.output), tables);
  const LookupFinish finish{a, plan, w, of, chunk, compared ? narrowed : nullptr, {a, plan, w, chunk}};
  const auto* places = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.places);
  const int64_t groups = plan.taps * plan.step, slots = of.slots() * 32;
  LookupPass pass{places, groups, nullptr, groups * kLookupsPanel, TableSums(a.quantization.x_most).per_byte, of.weights[0],
                  a.width.stride * size, (a.width.taps - 1) * a.width.dilation * size, true};
  alignas(64) uint16_t sums[kBlockPixels * kMostSlots * 32];
  WholeSums whole[4];
  for (int64_t p = 0; p < w.panels; p += tiles.panels()) {
    const int64_t panels = least(tiles.panels(), w.panels - p), stride = panels * slots;
    const int64_t segment = LookupTiles::segment(a, plan, panels * of.vectors(), narrow);
    const auto* weights = reinterpret_cast<const uint8_t*>(w.panel(p));
    for (int64_t t = 0; t < chunk.count; t += tiles.block()) {
      const int64_t some = least(tiles.block(), chunk.count - t);
      const uint8_t* pixels[kBlockPixels];
      for (int64_t i = 0; i < some; i++) pixels[i] = tables + (chunk.pixels[t + i].window - first * plan.wide) * size;
      for (int64_t k = 0; k < groups; k += segment) {
        pass.places = places + k, pass.count = least(segment, groups - k), pass.weights = weights + k * kLookupsPanel;
        pass.first = k == 0 || !narrow;
        block_tiles(of, pass, panels, pixels, some, sums, stride);
        if (!narrow)
          for (int64_t q = 0; q < panels; q++) widen_sums(of, sums + q * slots, stride, some, k == 0, &whole[q]);
      }
      for (int64_t q = 0; q < panels; q++) {
        const int64_t row = (p + q) * kLookupsPanel;
        if (narrow) finish(sums + q * slots, stride, t, some, row);
        else finish.whole.tile<4>(whole[q].of[0][0], kBlockPixels, some, t, row);
      }
    }
  }
  if (chunk.codes != nullptr) finish.whole.emit();
}

}  // namespace
