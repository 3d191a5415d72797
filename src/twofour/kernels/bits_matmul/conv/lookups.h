// Convolutions by tables: the 64 sums of 6 codes of a pixel that 6 bits of a weight can pick are looked up, for 64 outputs by
// one vpermb. A pixel's tables serve every window that reads it, every output and every plane of the weight. Sums of lookups
// stay bytes as long as they fit, then 16 bits. Codes of an answer are compared in 16 bits too where all sums fit them.
// Included by AVX-512 sources with VBMI; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../six_sums.h"
#include "conv.h"

namespace {

using twofour::kLookupsPanel;

constexpr int64_t kChunkTables = 384 << 10;  // bytes of the tables of a chunk of rows, which stay in L2
constexpr int64_t kBlockPixels = 32;         // whose sums of 16 bits stay in L1 while all inputs pass
constexpr int64_t kSegmentBytes = 26 << 10;  // of the weights that pass together: they stay in L1 for a block
constexpr int kBlockVectors = 8;             // planes of a panel, or of some panels
constexpr int64_t kVectorSums = 64;          // numbers of 16 bits: words, and the odd bytes of them

// Adds the lookups of `count` groups for T pixels and V vectors of weights to `sums`, [pixel][kBlockVectors][words, odd][32].
// Bytes 2 j and 2 j + 1 of a vector are outputs j and 32 + j. The even ones are the sums of words less the odd ones: modulo
// 2^16 no mask.
template <int T, int V>
TWOFOUR_NOINLINE void lookup_tile(const uint8_t* const* pixels, const int32_t* places, int64_t count, const uint8_t* w,
                                  int64_t vector, int64_t per_byte, bool first, uint16_t* sums) {
  __m512i words[T][V], odds[T][V];
  const uint8_t* pixel[T];
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    pixel[t] = pixels[t];
    TWOFOUR_UNROLL
    for (int v = 0; v < V; v++) {
      const uint16_t* from = sums + (t * kBlockVectors + v) * kVectorSums;
      words[t][v] = first ? _mm512_setzero_si512() : _mm512_load_si512(from);
      odds[t][v] = first ? _mm512_setzero_si512() : _mm512_load_si512(from + 32);
    }
  }
  for (int64_t k = 0; k < count;) {
    const int64_t stop = least(count, k + per_byte);
    __m512i bytes[T][V];
    const auto look = [&](bool begin) __attribute__((always_inline)) {
      __m512i index[V];
      TWOFOUR_UNROLL
      for (int v = 0; v < V; v++) {
        index[v] = _mm512_load_si512(w + v * vector);
        asm("" : "+v"(index[v]));  // else gcc loads it again for every pixel
      }
      const int64_t place = int64_t{places[k]} * 64;
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        __m512i table = _mm512_load_si512(pixel[t] + place);
        if constexpr (V > 1) asm("" : "+v"(table));
        TWOFOUR_UNROLL
        for (int v = 0; v < V; v++) {
          const __m512i found = _mm512_permutexvar_epi8(index[v], table);
          bytes[t][v] = begin ? found : _mm512_add_epi8(bytes[t][v], found);
        }
      }
      w += kLookupsPanel;
      k++;
    };
    look(true);
    while (k < stop) look(false);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < V; v++) {
        words[t][v] = _mm512_add_epi16(words[t][v], bytes[t][v]);
        odds[t][v] = _mm512_add_epi16(odds[t][v], _mm512_srli_epi16(bytes[t][v], 8));
      }
    }
  }
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < V; v++) {
      uint16_t* to = sums + (t * kBlockVectors + v) * kVectorSums;
      _mm512_store_si512(to, words[t][v]);
      _mm512_store_si512(to + 32, odds[t][v]);
    }
  }
}

using LookupRun = void (*)(const uint8_t* const*, const int32_t*, int64_t, const uint8_t*, int64_t, int64_t, bool, uint16_t*);

struct LookupShape {
  int pixels, vectors;
  LookupRun run;
};

// The tile for so many pixels and vectors: eight sums of bytes at once.
inline LookupShape lookup_shape(int64_t pixels, int64_t vectors) {
  if (vectors >= 4) return pixels >= 2 ? LookupShape{2, 4, lookup_tile<2, 4>} : LookupShape{1, 4, lookup_tile<1, 4>};
  if (vectors >= 2) {
    if (pixels >= 4) return {4, 2, lookup_tile<4, 2>};
    return pixels >= 2 ? LookupShape{2, 2, lookup_tile<2, 2>} : LookupShape{1, 2, lookup_tile<1, 2>};
  }
  if (pixels >= 8) return {8, 1, lookup_tile<8, 1>};
  if (pixels >= 4) return {4, 1, lookup_tile<4, 1>};
  return pixels >= 2 ? LookupShape{2, 1, lookup_tile<2, 1>} : LookupShape{1, 1, lookup_tile<1, 1>};
}

struct LookupTiles {
  using V = WholeLanes;
  static constexpr bool planes = false;
  static constexpr int64_t panel = kLookupsPanel, inputs = kTablesInputs;
  static constexpr const char* layout = "bits_lookups";

  const BitsHead& head;
  explicit LookupTiles(const BitsConv& a) : head(*static_cast<const BitsHead*>(a.weight)) {}

  static int64_t step(const PixelCodes& in) { return ceil_div(in.channels, kTablesInputs); }
  static int64_t size(const ConvPlan& plan) { return plan.step; }
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
  // Whether 16 bits hold every sum of values, and one more than the greatest.
  bool fits_words(const BitsConv& a, const ConvPlan& plan) const {
    const int64_t top = head.alpha * ((int64_t{1} << head.bits) - 1) + head.beta, low = -head.beta;
    const int64_t largest = plan.taps * a.in_channels * (top > low ? top : low) * a.quantization.x_most;
    return largest <= 32766;
  }
  // Panels that are computed together, and groups of inputs that are.
  int64_t panels() const { return head.bits >= 4 ? 1 : head.bits == 1 ? 4 : 2; }
  static int64_t segment(int64_t groups, int64_t vectors, int64_t per_byte) {
    const int64_t most = kSegmentBytes / (kLookupsPanel * least(vectors, 4));
    return round_up(ceil_div(groups, ceil_div(groups, most)), per_byte);
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

// From sums of lookups of a pixel and panel to its answer.
struct LookupFinish {
  const BitsConv& a;
  const ConvPlan& plan;
  const BitsWeight& w;
  const Chunk& chunk;
  const int16_t* thresholds;  // null: in 32 bits
  ConvFinish<WholeLanes> whole;

  // All planes of a panel, the even and the odd bytes' outputs, modulo 2^16. `Bits`: of the weight, 0 where they vary.
  template <int Bits>
  TWOFOUR_INLINE void sums(const uint16_t* from, __m512i (&both)[2]) const {
    __m512i words = _mm512_load_si512(from), odds = _mm512_load_si512(from + 32);
    for (int64_t p = 1; p < (Bits > 0 ? Bits : w.head.bits); p++) {
      const __m128i by = _mm_cvtsi64_si128(p);
      words = _mm512_add_epi16(words, _mm512_sll_epi16(_mm512_load_si512(from + p * kVectorSums), by));
      odds = _mm512_add_epi16(odds, _mm512_sll_epi16(_mm512_load_si512(from + p * kVectorSums + 32), by));
    }
    both[0] = _mm512_sub_epi16(words, _mm512_slli_epi16(odds, 8));
    both[1] = odds;
  }
  static TWOFOUR_INLINE __m512i all(uint32_t v) { return _mm512_set1_epi16(static_cast<int16_t>(v)); }
  // Codes of 64 outputs. 16 bits are enough for the values of sums: all is modulo 2^16 until then. `Most`: of a code, 0 where
  // it varies. What is read is held in locals: a store of bytes may change whatever memory holds.
  template <int Bits, int Most>
  TWOFOUR_NOINLINE void codes(const uint16_t* from, int64_t place, int64_t count, int64_t row) const {
    const auto factor = static_cast<uint32_t>(a.quantization.x_factor);
    const __m512i times = all(factor * static_cast<uint32_t>(w.head.alpha)), one = _mm512_set1_epi16(1);
    const uint32_t beside = factor * static_cast<uint32_t>(w.head.beta), zero = static_cast<uint32_t>(chunk.facts.range.zero);
    const int32_t most = Most > 0 ? Most : a.answer.most;
    const int64_t padded = plan.padded, step = plan.codes;
    const int16_t* numbers = thresholds + row;
    const OutputPixel* pixel = chunk.pixels + place;
    uint8_t* to = chunk.codes + place * step + row;
    for (; count-- > 0; pixel++, to += step, from += kBlockVectors * kVectorSums) {
      __m512i both[2];
      sums<Bits>(from, both);
      TWOFOUR_UNROLL
      for (int h = 0; h < 2; h++) {
        __m512i v = _mm512_add_epi16(_mm512_mullo_epi16(both[h], times), all(beside * static_cast<uint32_t>(pixel->sum)));
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
  // Sums in 32 bits, [4 vectors][kBlockPixels][16], then as all designs finish.
  TWOFOUR_NOINLINE void wide(const uint16_t* from, int64_t place, int64_t count, int64_t row) const {
    alignas(64) int32_t wide[4][kBlockPixels][16];
    const int64_t bits = w.head.bits;
    for (int64_t i = 0; i < count; i++, from += kBlockVectors * kVectorSums) {
      __m512i all[4];
      for (int64_t p = 0; p < bits; p++) {
        const __m512i words = _mm512_load_si512(from + p * kVectorSums), odd = _mm512_load_si512(from + p * kVectorSums + 32);
        const __m512i even = _mm512_sub_epi16(words, _mm512_slli_epi16(odd, 8));
        const __m256i parts[4] = {_mm512_castsi512_si256(even), _mm512_extracti64x4_epi64(even, 1),
                                  _mm512_castsi512_si256(odd), _mm512_extracti64x4_epi64(odd, 1)};
        const __m128i by = _mm_cvtsi64_si128(p);
        TWOFOUR_UNROLL
        for (int v = 0; v < 4; v++) {
          const __m512i one = _mm512_sll_epi32(_mm512_cvtepu16_epi32(parts[v]), by);
          all[v] = p == 0 ? one : _mm512_add_epi32(one, all[v]);
        }
      }
      TWOFOUR_UNROLL
      for (int v = 0; v < 4; v++) _mm512_store_si512(wide[v][i], all[v]);
    }
    whole.tile(wide[0][0], 4, kBlockPixels, count, place, row);
  }
  // Sums of `count` pixels from `place` of the chunk on, and the panel whose first output is `row`.
  void operator()(const uint16_t* from, int64_t place, int64_t count, int64_t row) const {
    const int64_t bits = w.head.bits, most = a.answer.most;
    if (thresholds == nullptr) {
      wide(from, place, count, row);
    } else if (bits == 1 && most == 1) {
      codes<1, 1>(from, place, count, row);
    } else if (bits == 1 && most == 3) {
      codes<1, 3>(from, place, count, row);
    } else if (bits == 2 && most == 3) {
      codes<2, 3>(from, place, count, row);
    } else {
      codes<0, 0>(from, place, count, row);
    }
  }
};

// Tables of the pixels that the windows of a chunk read, from row `first` of the padded image on.
inline void chunk_tables(const BitsConv& a, const ConvPlan& plan, int64_t first, int64_t rows, uint8_t* to) {
  const auto* codes = static_cast<const uint8_t*>(a.workspace) + plan.image + first * plan.wide * plan.pixel;
  for (int64_t p = 0; p < rows * plan.wide; p++) byte_tables(codes + p * plan.pixel, plan.step, to + p * plan.step * 64, 64);
}

inline void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const LookupTiles& tiles, const Chunk& chunk,
                       char* scratch) {
  const int64_t first = chunk.first / a.width.output * a.height.stride, size = plan.step * 64;
  auto* tables = reinterpret_cast<uint8_t*>(scratch) + LookupTiles::narrow(a, plan);
  auto* narrowed = reinterpret_cast<int16_t*>(scratch);
  const bool narrow = chunk.codes != nullptr && tiles.fits_words(a, plan);
  if (narrow) narrow_thresholds(a, plan, narrowed);
  else if (chunk.codes != nullptr) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  chunk_tables(a, plan, first, LookupTiles::rows_read(a, chunk.count / a.width.output), tables);
  const LookupFinish finish{a, plan, w, chunk, narrow ? narrowed : nullptr, {a, plan, w, chunk}};
  const auto* places = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.places);
  const int64_t groups = plan.taps * plan.step, vector = groups * kLookupsPanel;
  const int64_t per_byte = TableSums(a.quantization.x_most).per_byte;
  alignas(64) uint16_t sums[kBlockPixels * kBlockVectors * kVectorSums];
  for (int64_t p = 0; p < w.panels; p += tiles.panels()) {
    const int64_t panels = least(tiles.panels(), w.panels - p), vectors = panels * w.head.bits;
    const int64_t segment = LookupTiles::segment(groups, vectors, per_byte);
    const auto* weights = reinterpret_cast<const uint8_t*>(w.panel(p));
    for (int64_t t = 0; t < chunk.count; t += kBlockPixels) {
      const int64_t some = least(kBlockPixels, chunk.count - t);
      const uint8_t* pixels[kBlockPixels];
      for (int64_t i = 0; i < some; i++) pixels[i] = tables + (chunk.pixels[t + i].window - first * plan.wide) * size;
      for (int64_t k = 0; k < groups; k += segment)
        for (int64_t v = 0; v < vectors;) {
          int64_t done = 0;
          for (int64_t i = 0; i < some;) {
            const LookupShape shape = lookup_shape(some - i, vectors - v);
            shape.run(pixels + i, places + k, least(segment, groups - k), weights + v * vector + k * kLookupsPanel, vector,
                      per_byte, k == 0, sums + (i * kBlockVectors + v) * kVectorSums);
            i += shape.pixels, done = shape.vectors;
          }
          v += done;
        }
      for (int64_t q = 0; q < panels; q++) finish(sums + q * w.head.bits * kVectorSums, t, some, (p + q) * kLookupsPanel);
    }
  }
  if (chunk.codes != nullptr) finish.whole.emit();
}

}  // namespace
