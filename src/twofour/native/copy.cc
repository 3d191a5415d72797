// Copies between tensors of one shape, of any strides and types: what programs without torch have in place of its conversions.
#include <bit>
#include <cstring>
#include <type_traits>

#include "binding.h"

namespace twofour {
namespace {

struct Bf16 {
  uint16_t bits;
};

// As torch converts: to bool whether it is not zero, to bfloat16 the nearest, ties to even; else as C does.
template <class To, class From>
To converted(From from) {
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (std::is_same_v<From, Bf16>) {
    return converted<To, float>(std::bit_cast<float>(static_cast<uint32_t>(from.bits) << 16));
  } else if constexpr (std::is_same_v<To, Bf16>) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(from));
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  } else if constexpr (std::is_same_v<To, bool>) {
    return from != From{0};
  } else {
    return static_cast<To>(from);
  }
}

template <class To, class From>
void copy(const View& from, const View& to, const char* source, char* target, int axis) {
  const int64_t count = axis < from.ndim ? from.shape[axis] : 1;
  const int64_t step = axis < from.ndim ? from.strides[axis] * int64_t{sizeof(From)} : 0;
  const int64_t stride = axis < from.ndim ? to.strides[axis] * int64_t{sizeof(To)} : 0;
  if constexpr (std::is_same_v<To, From>)
    if (axis + 1 == from.ndim && step == sizeof(From) && stride == step)
      return void(std::memcpy(target, source, static_cast<size_t>(count) * sizeof(From)));
  for (int64_t i = 0; i < count; i++, source += step, target += stride) {
    if (axis + 1 < from.ndim) {
      copy<To, From>(from, to, source, target, axis + 1);
      continue;
    }
    From value;
    std::memcpy(&value, source, sizeof value);
    const To result = converted<To, From>(value);
    std::memcpy(target, &result, sizeof result);
  }
}

// Calls `with` with a number of the type; bool is read as a byte, of which any may stand there.
template <class With>
void of_type(Type type, const With& with) {
  switch (type) {
    case Type::f32: return with(float{});
    case Type::bf16: return with(Bf16{});
    case Type::u8: return with(uint8_t{});
    case Type::s8: return with(int8_t{});
    case Type::boolean: return with(bool{});
    case Type::s64: return with(int64_t{});
    default: throw std::invalid_argument("no such numbers");
  }
}

constexpr Types kNumbers{Type::f32, Type::bf16, Type::u8, Type::s8, Type::boolean, Type::s64};

}  // namespace

void bind_copy(nb::module_& m) {
  // `to` has the shape of `from`, at most 16 axes; real numbers do not become whole ones.
  bind_call(m, "copy", +[](const Operand& from, const Answer& to, Threads) {
    const Border border("copy");
    const View source = border.strided(from, "input", kNumbers), target = border.strided(to, "answer", kNumbers);
    border.require(source.ndim == target.ndim && source.ndim <= 16, to, "answer", "the input's axes, at most 16");
    for (int i = 0; i < source.ndim; i++) border.require(source.shape[i] == target.shape[i], to, "answer", "the input's shape");
    const bool real = source.type == Type::f32 || source.type == Type::bf16;
    const bool keeps = target.type == Type::f32 || target.type == Type::bf16 || target.type == Type::boolean;
    border.require(!real || keeps, to, "answer", "real numbers, or bool, of an input of real numbers");
    if (source.count() == 0) return;
    const Unlocked unlocked;
    of_type(target.type, [&]<class To>(To) {
      of_type(source.type, [&]<class From>(From) {
        using Read = std::conditional_t<std::is_same_v<From, bool>, uint8_t, From>;
        copy<To, Read>(source, target, source.data, target.data, 0);
      });
    });
  });
}

}  // namespace twofour
