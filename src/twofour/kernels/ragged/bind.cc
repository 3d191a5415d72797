// Ragged batches for Python: which places of a padded batch are real tokens, and rows that move between both forms.
#include <algorithm>
#include <cstring>

#include "native/binding.h"
#include "native/parallel.h"

namespace twofour {
namespace {

constexpr Types kNumbers{Type::f32, Type::bf16, Type::u8, Type::s8, Type::boolean, Type::s64};

// A mask (sequences, length): 1 of a real token, 0 of padding. Calls with(mask, a number of its type).
template <class With>
auto of_mask(const Border& border, const Operand& operand, const With& with) {
  const View v = border.strided(operand, "mask", {Type::s64, Type::boolean, Type::f32});
  border.require(v.ndim == 2, operand, "mask", "(sequences, length)");
  switch (v.type) {
    case Type::s64: return with(v, int64_t{});
    case Type::f32: return with(v, float{});
    default: return with(v, uint8_t{});
  }
}

template <class Number>
Number number_at(const View& v, int64_t sequence, int64_t token) {
  Number found;
  std::memcpy(&found, v.data + (sequence * v.strides[0] + token * v.strides[1]) * int64_t{sizeof(Number)}, sizeof found);
  return found;
}

template <class Number>
int64_t count_real(const View& v) {
  int64_t real = 0, odd = 0;
  for (int64_t b = 0; b < v.shape[0]; ++b) {
    if (v.shape[1] == 0 || number_at<Number>(v, b, 0) != Number{1}) return -1;
    for (int64_t s = 0; s < v.shape[1]; ++s) {
      const Number found = number_at<Number>(v, b, s);
      real += found == Number{1};
      odd += found != Number{1} && found != Number{0};
    }
  }
  return odd ? -1 : real;
}

}  // namespace

void bind_ragged(nb::module_& m) {
  // How many real tokens a mask has; -1 where a sequence does not begin with one, or numbers other than 0 and 1 stand there.
  m.def("real_tokens", [](const Operand& mask) {
    return of_mask(Border("real_tokens"), mask, []<class Number>(const View& v, Number) { return count_real<Number>(v); });
  });
  // What packs a batch of that mask: `rows`, int64 (room,), says which place of the padded batch each packed row has, in
  // their order, and behind the last one repeats the first; `offsets`, int64 (sequences + 2,), where each sequence begins
  // there, where the last ends, and where the repetitions do; `places`, int64 (sequences, length), is the inverse, -1 of padding.
  m.def("lay_out", [](const Operand& mask, const Answer& rows, const Answer& offsets, const Answer& places) {
    const Border border("lay_out");
    of_mask(border, mask, [&]<class Number>(const View& v, Number) {
      const View packed = border.dense(rows, "rows", {Type::s64});
      const int64_t sequences = v.shape[0], length = v.shape[1], room = packed.count(), real = count_real<Number>(v);
      border.require(real > 0 && real <= room, rows, "rows", "room for the real tokens, with which each sequence begins");
      auto* const row = reinterpret_cast<int64_t*>(packed.data);
      auto* const offset = reinterpret_cast<int64_t*>(border.exactly(offsets, "offsets", {Type::s64}, sequences + 2).data);
      auto* const place = reinterpret_cast<int64_t*>(border.exactly(places, "places", {Type::s64}, v.count()).data);
      int64_t next = 0;
      for (int64_t b = 0; b < sequences; ++b) {
        offset[b] = next;
        for (int64_t at = b * length; at < (b + 1) * length; ++at) {
          const bool is_real = next < room && number_at<Number>(v, b, at - b * length) == Number{1};
          place[at] = is_real ? next : -1;
          if (is_real) row[next++] = at;
        }
      }
      offset[sequences] = next, offset[sequences + 1] = room;
      std::fill(row + next, row + room, row[0]);
    });
  });
  // to[i] = from[places[i]], rows of one type and width; zeros where a place is -1.
  bind_call(m, "take_rows", +[](const Operand& from, const Operand& places, const Answer& to, Threads threads) {
    const Border border("take_rows");
    const Rows source = border.rows(from, "input", kNumbers), target = border.rows(to, "answer", kNumbers);
    const View order = border.dense(places, "places", {Type::s64});
    const auto* const place = reinterpret_cast<const int64_t*>(order.data);
    border.require(target.type == source.type && target.width == source.width && target.rows == order.count(), to, "answer",
                   "a row of the input's type and width for each place");
    border.require(target.rows <= 1 || target.stride >= target.width, to, "answer", "rows of their own memory");
    border.require(std::all_of(place, place + target.rows, [&](int64_t p) { return -1 <= p && p < source.rows; }), places,
                   "places", "rows of the input, or -1");
    const int64_t width = border.strided(from, "input", kNumbers).width;
    const auto bytes = static_cast<size_t>(source.width * width);
    if (target.rows == 0 || bytes == 0) return;
    const Unlocked unlocked;
    parallel_for(target.rows, 16, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        char* const row = target.data + i * target.stride * width;
        if (place[i] < 0) std::memset(row, 0, bytes);
        else std::memcpy(row, source.data + place[i] * source.stride * width, bytes);
      }
    });
  });
}

}  // namespace twofour
