// The values that a 2:4 weight keeps, beside the inputs that they multiply: a permutation in the register picks four of eight
// inputs for each output, a dot of bytes multiplies them, so that zeros take neither time nor memory. Values are bytes, or
// of up to 4 bits half bytes that are taken apart in registers, for few tokens.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/octet_dots.h"
#include "kernels/octet_lanes.h"
#include "tokens.h"

namespace {

using twofour::kKeptCodes;
using twofour::kKeptInputs;
using twofour::kKeptPanel;
using twofour::kKeptUnit;
using twofour::kPackedKeptPanel;
using twofour::kPackedKeptUnit;

// Bytes of weights that are fetched before they are read, to L1 and L2: the best of 2 to 16 KB for 1 to 4 tokens on Zen 5.
// Of bytes twice at one distance took 0.9 of the time of once.
constexpr int64_t kKeptNear = 4096, kKeptFar = 12288;
constexpr int64_t kKeptUnits = 4096;  // whose sums of half bytes, 16 times their values, an int32 holds

static_assert(kKeptUnit == 2 * kOctetHalfBytes && kKeptPanel == 2 * kRowUnit && kKeptInputs == kRowTile);

// Inputs 8 o ... 8 o + 7 of token t, counted from a unit on.
struct TokenOctets {
  const uint8_t* x;
  int64_t stride;
  TWOFOUR_INLINE const uint8_t* operator()(int t, int o) const { return x + t * stride + o * 8; }
  TWOFOUR_INLINE void next() { x += kRowTile; }
};

// Values of a byte: units of "int8_rows".
struct KeptBytes {
  using V = OctetLanes;
  static constexpr const char* layout = "bits_2x4_bytes";
  static constexpr int64_t panel = kKeptPanel, unit = kKeptUnit;
  static constexpr int columns = V::width == 16 ? 2 : kRowUnit / V::width;  // vectors of outputs at a time
  static constexpr int tokens = V::width == 16 ? 8 : 4;
  static constexpr int shift = 0;

  template <int T, int Sets>
  static TWOFOUR_INLINE void add(const char* at, int64_t output, const TokenOctets& x, V::ints (&sums)[Sets][columns][T]) {
    constexpr int halves = columns * V::width / kRowUnit;
    const auto* half = reinterpret_cast<const uint8_t*>(at) + output / kRowUnit * kOctetHalfBytes;
    add_octets<V, T, halves, Sets>(half, x, [](const uint8_t* line) TWOFOUR_INLINED { V::prefetch(line, kKeptNear, kKeptNear); }, sums);
  }
};

// Which two of four inputs the codes 0 ... 5 keep; what is no code keeps the first, so that damage reads nothing else.
constexpr int kFirstKept[8] = {0, 0, 0, 1, 1, 2, 0, 0}, kSecondKept[8] = {1, 2, 3, 2, 3, 3, 0, 0};

// Values of half a byte with a sign, and three bits for where the two of a four stand (bits.h).
struct KeptHalves {
  using V = OctetLanes;
  static constexpr const char* layout = "bits_2x4_packed";
  static constexpr int64_t panel = kPackedKeptPanel, unit = kPackedKeptUnit;
  static constexpr int columns = V::width == 16 ? 4 : 2, tokens = 4;
  static constexpr int shift = 4;  // a value stands in the upper half of its byte: sums are 16 times too large

#if defined(TWOFOUR_SET_avx512_vnni)
  struct alignas(64) Bytes {
    uint8_t of[64];
    template <class Byte>
    constexpr explicit Bytes(const Byte& byte) : of{} {
      for (int b = 0; b < 64; b++) of[b] = static_cast<uint8_t>(byte(b));
    }
  };
  // 24 bits of each of 16 outputs: four outputs in the first dwords of each quarter of a vector.
  static TWOFOUR_INLINE V::ints codes_of(const uint8_t* at) {
    const auto quarters = _mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
    return _mm512_permutexvar_epi32(quarters, _mm512_loadu_si512(at));
  }
  // Two of an output's three bytes, those with the codes of this octet, to both words of its lane; the codes of its fours to
  // the lowest bits of a word each, which looks up both places.
  template <int o>
  static TWOFOUR_INLINE V::Octet octet(V::ints values, V::ints codes) {
    static constexpr int byte = o / 2, bit = 6 * o - 8 * byte;
    static constexpr Bytes two([](int b) { return b % 16 / 4 * 3 + byte + b % 2; });
    static constexpr Bytes table([](int b) { return b % 32 / 16 * 4 + (b % 2 == 0 ? kFirstKept : kSecondKept)[b / 2 % 8]; });
    const auto words = _mm512_shuffle_epi8(codes, V::load_ints(two.of));
    const auto found = _mm512_srlv_epi16(words, _mm512_set1_epi32(bit | (bit + 3) << 16));
    const auto index = _mm512_ternarylogic_epi32(found, _mm512_set1_epi16(7), _mm512_set1_epi32(8 << 16), 0xea);  // (a & b) | c
    return {values, _mm512_permutexvar_epi16(index, V::load_ints(table.of))};
  }
#elif defined(TWOFOUR_SET_avx2)
  // 24 bits of each of 8 outputs as dwords; values stand behind the codes, so that whole vectors can be read.
  static TWOFOUR_INLINE V::ints codes_of(const uint8_t* at) {
    const auto four = [&](int n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 12 * n)); };
    const __m256i spread = _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, 0, 1, 2, -1, 3, 4, 5, -1, 6, 7,
                                            8, -1, 9, 10, 11, -1);
    return _mm256_shuffle_epi8(_mm256_set_m128i(four(1), four(0)), spread);
  }
  // The code of each four of an octet twice, in a byte each, then one lookup of both tables.
  template <int o>
  static TWOFOUR_INLINE V::Octet octet(V::ints values, V::ints codes) {
    const V::U both = (V::U)codes >> 6 * o, apart = (both & 7) | (both & 0x38) << 13;
    const auto index = (V::ints)(apart | apart << 8 | 0x08000800u);
    const auto& a = kFirstKept;
    const auto& b = kSecondKept;
    const __m128i table = _mm_setr_epi8(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
    return V::octet(values, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index));
  }
#else
  static TWOFOUR_INLINE V::ints codes_of(const uint8_t* at) {
    alignas(64) int32_t codes[V::width];
    for (int r = 0; r < V::width; r++) codes[r] = at[3 * r] | at[3 * r + 1] << 8 | at[3 * r + 2] << 16;
    return V::load_ints(codes);
  }
  template <int o>
  static TWOFOUR_INLINE V::Octet octet(V::ints values, V::ints codes) {
    alignas(64) int32_t lanes[V::width], indices[V::width];
    V::store_ints(lanes, codes);
    for (int r = 0; r < V::width; r++) {
      const int first = lanes[r] >> 6 * o & 7, second = lanes[r] >> (6 * o + 3) & 7;
      indices[r] = kFirstKept[first] | kSecondKept[first] << 8 | kFirstKept[second] << 16 | kSecondKept[second] << 24;
    }
    return V::octet(values, V::load_ints(indices));
  }
#endif

  template <int T, int Sets, int o>
  static TWOFOUR_INLINE void add_octet(const uint8_t* values, const V::ints (&codes)[columns], const TokenOctets& x,
                                       V::ints (&sums)[Sets][columns][T]) {
    typename V::Octet octets[columns];
    TWOFOUR_UNROLL
    for (int b = o * 3; b < o * 3 + 3 && b < 11; b++) {
      if (T == 1) __builtin_prefetch(values + b * 64 + kKeptNear);
      else V::prefetch(values + b * 64, kKeptNear, kKeptFar);
    }
    TWOFOUR_UNROLL
    for (int c = 0; c < columns; c++) {
      const int64_t output = c * V::width;
      const auto two = V::load_ints(values + output / kRowUnit * 128 + output % kRowUnit * 4 + o / 2 * 64);
      const auto upper = (typename V::U)two << (o % 2 == 0 ? 4 : 0) & 0xf0f0f0f0u;
      octets[c] = octet<o>((V::ints)upper, codes[c]);
    }
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const auto eight = V::broadcast8(x(t, o));
      TWOFOUR_UNROLL
      for (int c = 0; c < columns; c++) sums[o % Sets][c][t] = V::dot(sums[o % Sets][c][t], eight, octets[c]);
    }
  }

  template <int T, int Sets>
  static TWOFOUR_INLINE void add(const char* at, int64_t output, const TokenOctets& x, V::ints (&sums)[Sets][columns][T]) {
    const auto* from = reinterpret_cast<const uint8_t*>(at);
    V::ints codes[columns];
    TWOFOUR_UNROLL
    for (int c = 0; c < columns; c++) codes[c] = codes_of(from + 3 * (output + c * V::width));
    const uint8_t* values = from + kKeptCodes + output / kRowUnit * 128 + output % kRowUnit * 4;
    add_octet<T, Sets, 0>(values, codes, x, sums);
    add_octet<T, Sets, 1>(values, codes, x, sums);
    add_octet<T, Sets, 2>(values, codes, x, sums);
    add_octet<T, Sets, 3>(values, codes, x, sums);
  }
};

// Sums of K::columns vectors of outputs for T tokens, to sums[columns][T][width].
template <class K, int T>
TWOFOUR_NOINLINE void kept_tile(const char* panel, int64_t output, TokenOctets x, int64_t units, int32_t* to) {
  using V = typename K::V;
  constexpr int Sets = octet_sets<V>(K::columns * T);
  for (int64_t first = 0; first < units; first += kKeptUnits) {
    typename V::ints sums[Sets][K::columns][T] = {};
    for (int64_t u = first; u < units && u < first + kKeptUnits; u++, panel += K::unit, x.next())
      K::template add<T, Sets>(panel, output, x, sums);
    TWOFOUR_UNROLL
    for (int c = 0; c < K::columns; c++) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        auto sum = sums[0][c][t];
        TWOFOUR_UNROLL
        for (int s = 1; s < Sets; s++) sum = V::add(sum, sums[s][c][t]);
        sum = (typename V::ints)((typename V::I)sum >> K::shift);
        int32_t* at = to + (c * T + t) * V::width;
        V::store_ints(at, first == 0 ? sum : V::add(sum, V::load_ints(at)));
      }
    }
  }
}

// The tile of up to K::tokens tokens, and how many it takes of them.
template <class K>
struct KeptTile {
  void (*run)(const char*, int64_t, TokenOctets, int64_t, int32_t*);
  int64_t tokens;
  static KeptTile of(int64_t left) {
    if (K::tokens > 4 && left >= K::tokens) return {kept_tile<K, K::tokens>, K::tokens};
    if (left >= 4) return {kept_tile<K, 4>, 4};
    if (left >= 2) return {kept_tile<K, 2>, 2};
    return {kept_tile<K, 1>, 1};
  }
};

template <class K>
BitsPlan kept_plan(const Matmul& a) {
  return BitsPlan(a, padded_inputs(a.in_features), K::tokens);
}

// Panels [begin, end) for `count` tokens from `first` on, whose codes are `x`.
template <class K>
void kept_panels(const Matmul& a, const BitsWeight& w, const uint8_t* x, const BitsPlan& plan, const TokenFacts& facts,
                 int64_t first, int64_t count, int64_t begin, int64_t end) {
  using V = typename K::V;
  constexpr int64_t together = K::columns * V::width;
  alignas(64) int32_t sums[K::tokens * together];
  const int64_t units = ceil_div(a.in_features, kRowTile);
  for (int64_t p = begin; p < end; p++)
    for (int64_t t = 0; t < count;) {
      const auto tile = KeptTile<K>::of(count - t);
      fetch_answers(a, first + t, tile.tokens, p * K::panel, K::panel);
      for (int64_t c = 0; c < K::panel && p * K::panel + c < a.out_features; c += together) {
        tile.run(w.panel(p), c, {x + t * plan.token_bytes, plan.token_bytes}, units, sums);
        finish_codes<V>(a, w, sums, K::columns, tile.tokens, facts, first + t, tile.tokens, p * K::panel + c);
      }
      t += tile.tokens;
    }
}

template <class K>
void kept_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout(K::layout), a.weight, a.out_features, a.in_features);
  const BitsPlan plan = kept_plan<K>(a);
  const TokenFacts facts(a.workspace, a.tokens);
  auto* x = static_cast<uint8_t*>(a.workspace) + plan.facts;
  with_team(a.threads, [&](const Team& team) {
    int64_t begin, end;
    team.share(w.panels, 1, &begin, &end);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        token_codes<typename K::V>(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
      team.barrier();
      kept_panels<K>(a, w, x, plan, facts, pass, count, begin, end);
    }
  });
}

}  // namespace
