// Functions of float vectors to within an ulp or two, as accurate as torch's own. V is a vector type as of
// kernels/epilogue_math.h: V::reg of the compiler's vector extension, and V::width. Internal linkage.
//
// The polynomials are minimax fits made for this file (weighted least squares, reweighted towards the largest error, on
// Chebyshev points). tests/kernels/test_fused_block.py holds each function against float64 beside torch's.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/epilogue_math.h"

namespace {

template <class V>
struct PreciseMath : FloatMath<V> {
  using Base = FloatMath<V>;
  using typename Base::F;
  using I = typename V::I;
  typedef uint32_t U __attribute__((vector_size(sizeof(F))));  // sums of bits: those of lanes that nobody reads wrap
  using Base::at_least, Base::at_most;

  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the whole number in the low bits
  static constexpr float kInfinity = __builtin_inff(), kNaN = __builtin_nanf("");

  static TWOFOUR_INLINE F select(I chosen, F yes, F no) { return chosen ? yes : no; }
  static TWOFOUR_INLINE F all(float value) { return V::all(value); }
  static TWOFOUR_INLINE F absolute(F x) { return (F)((I)x & INT32_MAX); }
  static TWOFOUR_INLINE F with_sign(F x, F sign) { return (F)((I)x | ((I)sign & INT32_MIN)); }
  static TWOFOUR_INLINE F power_of_two(I n) { return (F)(((U)n + 127u) << 23); }

  static TWOFOUR_INLINE I places() {
    I i{};
    for (int k = 0; k < V::width; k++) i[k] = k;
    return i;
  }
  // Every second number of a and of b, beginning with `begin`.
  template <int begin, int... i>
  static TWOFOUR_INLINE F every_second(F a, F b, std::integer_sequence<int, i...>) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, (2 * i + begin)...);
#else
    return __builtin_shuffle(a, b, I{(2 * i + begin)...});  // GCC before 12
#endif
  }
  // The upper words of a's dwords, then of b's.
  template <int... i>
  static TWOFOUR_INLINE F upper_words(F a, F b, std::integer_sequence<int, i...>) {
    typedef uint16_t W __attribute__((vector_size(sizeof(F))));
#if __has_builtin(__builtin_shufflevector)
    return (F)__builtin_shufflevector((W)a, (W)b, (2 * i + 1)...);
#else
    return (F)__builtin_shuffle((W)a, (W)b, W{(2 * i + 1)...});  // GCC before 12
#endif
  }
  // `count` vectors, a power of two up to V::width -> one number of each, in their order and again behind it. They are
  // overwritten.
  template <int count, class Of>
  static TWOFOUR_INLINE F across(F* parts, const Of& of) {
    constexpr std::make_integer_sequence<int, V::width> all{};
    TWOFOUR_UNROLL
    for (int left = V::width, n = count; left > 1; left /= 2, n = (n + 1) / 2) {
      TWOFOUR_UNROLL
      for (int k = 0; k < n; k += 2) {
        const F a = parts[k], b = parts[n == 1 ? k : k + 1];
        parts[k / 2] = of(every_second<0>(a, b, all), every_second<1>(a, b, all));
      }
    }
    return parts[0];
  }

  template <int n>
  static TWOFOUR_INLINE F polynomial(const float (&c)[n], F x) {
    F p = all(c[n - 1]);
    TWOFOUR_UNROLL
    for (int i = n - 2; i >= 0; i--) p = p * x + c[i];
    return p;
  }

  // Calls a function of one number for each lane: where there is no vector form worth having.
  template <class Of>
  static F by_lane(F x, const Of& of) {
    F y = x;
    for (int i = 0; i < V::width; i++) y[i] = of(x[i]);
    return y;
  }
  static TWOFOUR_INLINE bool any(I mask) {
    int32_t all = 0;
    for (int i = 0; i < V::width; i++) all |= mask[i];
    return all != 0;
  }

  // x = n ln 2 + r + rest with |r| <= ln 2 / 2; ln 2 in two parts, of which the first times n is exact.
  static TWOFOUR_INLINE F reduced(F x, I* n, F* rest) {
    const F rounded = x * 1.44269504f + kRound, k = rounded - kRound;
    *n = (I)((U)rounded - (U)all(kRound));
    const F high = x - k * 0.693359375f, low = k * 2.12194440e-4f, r = high + low;
    *rest = (high - r) + low;
    return r;
  }
  // e^r - 1 - r for such an r.
  static TWOFOUR_INLINE F expm1_tail(F r) {
    constexpr float c[] = {0.5f, 0.166666657f, 0.0416662954f, 0.00833349675f, 0.0013944651f, 0.000197903501f};
    return r * r * polynomial(c, r);
  }
  // e^x = (*sum + *rest) 2^n: the rounding of the sum stands in `rest`, with all that is small.
  static TWOFOUR_INLINE void exp_parts(F x, F* sum, F* rest, I* n) {
    F more;
    const F r = reduced(x, n, &more);
    *sum = r + 1.0f;
    *rest = ((1.0f - *sum) + r) + (expm1_tail(r) + more * *sum);
  }
  static TWOFOUR_INLINE F exp(F x) {
    F sum, rest;
    I n;
    exp_parts(at_most(89.0f, at_least(-104.0f, x)), &sum, &rest, &n);
    // In two steps: 2^128 and what is denormal are reached by numbers that float32 has.
    const I half = n >> 1;
    return (sum + rest) * power_of_two(half) * power_of_two(n - half);
  }
  // 2^n (e^r - 1) + (2^n - 1); beyond 88 what e^x is short by is nothing.
  static TWOFOUR_INLINE F expm1(F x) {
    I n;
    F more;
    const F r = reduced(at_most(88.0f, at_least(-104.0f, x)), &n, &more), power = power_of_two(maximum_of(n, -126));
    const F tail = (expm1_tail(r) + more * (r + 1.0f)) * power, near = r * power, one = power - 1.0f;
    const F sum = near + one;  // the larger first: what the sum loses is added with the tail
    const F lost = select(absolute(near) > absolute(one), (near - sum) + one, (one - sum) + near);
    return with_sign(select(x > 88.0f, exp(x), sum + (lost + tail)), x);
  }
  static TWOFOUR_INLINE I maximum_of(I a, int32_t least) { return a > least ? a : I{} + least; }

  // log(1 + f) for 1 + f from sqrt(1/2) to sqrt(2), less f: f^3 P(f) - f^2 / 2.
  static TWOFOUR_INLINE F log_tail(F f) {
    constexpr float c[] = {0.333333135f,   -0.250000089f, 0.200021192f,  -0.166679963f, 0.142195523f,
                           -0.124055892f, 0.11888162f,   -0.116756521f, 0.067466408f};
    const F square = f * f;
    return square * f * polynomial(c, f) - square * 0.5f;
  }
  static TWOFOUR_INLINE F log(F x) {
    const I tiny = x < 1.17549435e-38f;
    const F scaled = select(tiny, x * 8388608.0f, x);
    const I e = (I)((U)scaled - 0x3f3504f3u) >> 23;
    const F f = (F)((U)scaled - ((U)e << 23)) - 1.0f;
    const F k = __builtin_convertvector(e, F) - select(tiny, all(23.0f), all(0.0f));
    F y = k * -2.12194440e-4f + log_tail(f);
    y = y + f + k * 0.693359375f;
    y = select(x == kInfinity, x, y);
    y = select(x == 0.0f, all(-kInfinity), y);
    return select(x >= 0.0f, y, all(kNaN));
  }
  static TWOFOUR_INLINE F log1p(F x) {
    const F u = x + 1.0f;
    const F y = log(u) + (x - (u - 1.0f)) / u;  // what the sum lost
    return select((absolute(x) < 1e-7f) | (x == kInfinity), x, select(u == 0.0f, all(-kInfinity), y));
  }

  static TWOFOUR_INLINE F tanh(F x) {
    constexpr float c[] = {-0.333333313f, 0.133332059f, -0.0539467633f, 0.0217007026f, -0.0081773987f, 0.00214296184f};
    const F t = absolute(x), square = x * x;
    const F near = square * x * polynomial(c, square) + x;
    // 1 - 2 / (e^2t + 1), e^2t in two parts, and the quotient with what its rounding left over.
    F sum, rest;
    I n;
    exp_parts(at_most(10.0f, t) * 2.0f, &sum, &rest, &n);
    const F power = power_of_two(n), whole = sum + rest, high = whole * power, divisor = high + 1.0f;
    const F more = ((high - divisor) + 1.0f) + ((sum - whole) + rest) * power;
    const F quotient = 2.0f / divisor;
    const F left = ((2.0f - quotient * divisor) - quotient * more) / divisor;
    const F first = 1.0f - quotient, far = first + (((1.0f - first) - quotient) - left);
    return with_sign(select(t < 0.625f, near, far), x);
  }
  // Below 1 a polynomial; above, 1 - erfc with log2(erfc) a polynomial: what it is wrong by is small beside 1.
  static TWOFOUR_INLINE F erf(F x) {
    constexpr float near[] = {0.128379166f,     -0.376126379f,   0.112837911f,     -0.0268661194f, 0.00522377994f,
                              -0.000854394864f, 0.000119956952f, -1.44144042e-05f, 1.37311451e-06f, -7.69640565e-08f};
    constexpr float far[] = {0.000169470353f, -1.62923253f,     -0.914222658f,   -0.155790344f,
                             0.0360285118f,   -0.00595702603f, 0.000617616926f, -2.98754985e-05f};
    const F t = absolute(x), below = at_most(4.0f, t);
    const F large = 1.0f - Base::exp2_of(polynomial(far, below));
    return select(t < 1.0f, x * polynomial(near, x * x) + x, with_sign(large, x));
  }

  // sin(x + quadrant * pi / 2). pi / 2 in three parts: beyond 8192 they do not reach, and the C library is asked.
  template <class Of>
  static TWOFOUR_INLINE F circular(F x, int quadrant, const Of& library) {
    constexpr float s[] = {-0.166666672f, 0.00833332911f, -0.000198393129f, 2.71812155e-06f};
    constexpr float c[] = {0.0416666679f, -0.00138888834f, 2.47994594e-05f, -2.72057548e-07f};
    const I beyond = ~(absolute(x) < 8192.0f);
    const F rounded = x * 0.636619772f + kRound, k = rounded - kRound;
    const I n = (I)((U)rounded + static_cast<uint32_t>(quadrant));
    const F r = ((x - k * 1.5703125f) - k * 4.837512969970703e-4f) - k * 7.549789948768648e-8f;
    const F square = r * r;
    const F sine = with_sign(square * r * polynomial(s, square) + r, r);  // of -0
    const F cosine = square * square * polynomial(c, square) - square * 0.5f + 1.0f;
    const F part = select((n & 1) != 0, cosine, sine), y = (F)((U)part ^ ((U)(n & 2) << 30));
    // Lane by lane: a number's answer is no other than among others.
    return any(beyond) ? select(beyond, by_lane(x, library), y) : y;
  }
  static TWOFOUR_INLINE F sin(F x) {
    return circular(x, 0, [](float v) { return __builtin_sinf(v); });
  }
  static TWOFOUR_INLINE F cos(F x) {
    return circular(x, 1, [](float v) { return __builtin_cosf(v); });
  }

  static TWOFOUR_INLINE F sigmoid(F x) { return 1.0f / (exp(-x) + 1.0f); }

  // Whole numbers next to x; from 2^23 on every float is one. `shift`: 0 nearest, ties to even.
  static TWOFOUR_INLINE F round(F x) {
    const F t = absolute(x), near = (t + 8388608.0f) - 8388608.0f;
    return select(t < 8388608.0f, with_sign(near, x), x);
  }
  static TWOFOUR_INLINE F floor(F x) {
    const F near = round(x);
    return with_sign_of_zero(near - select(near > x, all(1.0f), all(0.0f)), x);
  }
  static TWOFOUR_INLINE F ceil(F x) {
    const F near = round(x);
    return with_sign_of_zero(near + select(near < x, all(1.0f), all(0.0f)), x);
  }
  static TWOFOUR_INLINE F trunc(F x) { return with_sign(floor(absolute(x)), x); }
  static TWOFOUR_INLINE F with_sign_of_zero(F y, F x) { return select(y == 0.0f, with_sign(y, x), y); }

  // The larger or smaller; NaN where either is, as torch's: of two that do not compare the vector's are the second.
  static TWOFOUR_INLINE F maximum(F a, F b) { return select(a != a, a, V::max(a, b)); }
  static TWOFOUR_INLINE F minimum(F a, F b) { return select(a != a, a, V::min(a, b)); }
  static TWOFOUR_INLINE F truth(I chosen) { return select(chosen, all(1.0f), all(0.0f)); }
  static TWOFOUR_INLINE F sign(F x) { return truth(x > 0.0f) - truth(x < 0.0f); }
  // To bfloat16, nearest even, and back; a NaN stays one.
  static TWOFOUR_INLINE I bfloat16_bits(F x) {
    const U bits = (U)x, even = bits + 0x7fff + ((bits >> 16) & 1);
    return (I)select(x != x, (F)(bits | 0x400000), (F)even);
  }
  static TWOFOUR_INLINE F rounded_to_bfloat16(F x) { return (F)(bfloat16_bits(x) & (I{} - 65536)); }
};

}  // namespace
