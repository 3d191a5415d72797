// Native calls that can be recorded and run again: a function bound by `bind_call` is one for Python, and a `RecordedCall` for an
// executor, which hands it descriptors in place of tensors. The border looks at both alike. Without Python such calls are read
// from bytes, by the names that they are bound by.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "operand.h"

namespace twofour {

// One call without its operands: `run` takes as many as there were, and how many threads it may use, 0 for as many as it was
// recorded with. False: a weight is not what it was. `write` gives its other arguments as bytes.
struct RecordedCall {
  std::string name;
  std::function<bool(const Operand*, int threads)> run;
  std::function<void(ByteWriter&)> write;
};

struct RecordedOperand {
  Operand operand;
  bool written;
};

// A bound function by its name: `read` makes a call of the bytes of its arguments, and says of each operand whether it is
// written.
struct BoundCall {
  std::string name;
  std::function<RecordedCall(ByteReader&, std::vector<bool>* written)> read;
};
inline std::vector<BoundCall>& bound_calls() {
  static auto& all = *new std::vector<BoundCall>;  // never destroyed: a thread may be at work while the process ends
  return all;
}

namespace recording {

template <class One>
void collect(const One& given, std::vector<RecordedOperand>* all) {
  if constexpr (std::is_base_of_v<Operand, One>) all->push_back({given, std::is_same_v<One, Answer>});
}
template <class One>
void collect(const ListOf<One>& several, std::vector<RecordedOperand>* all) {
  for (const One& one : several) collect(one, all);
}

template <class One>
One pick(const One& kept, const Operand*& next, int threads) {
  if constexpr (std::is_base_of_v<Operand, One>) return One{*next++};
  else if constexpr (std::is_same_v<One, Threads>) return threads > 0 ? Threads{{threads}} : kept;
  else return kept;
}
template <class One>
ListOf<One> pick(const ListOf<One>& kept, const Operand*& next, int) {
  ListOf<One> several;
  for (size_t i = 0; i < kept.size(); i++) several.push_back(One{*next++});
  return several;
}

template <class R, class... Args, size_t... kPlaces>
RecordedCall recorded(const char* name, R (*function)(Args...), std::index_sequence<kPlaces...>,
                      std::tuple<std::remove_cvref_t<Args>...> kept) {
  const auto write = [kept](ByteWriter& to) {
    (Argument<std::remove_cvref_t<Args>>::write(std::get<kPlaces>(kept), to), ...);
  };
  return {name,
          [function, kept = std::move(kept)](const Operand* next, int threads) {
            std::tuple<std::remove_cvref_t<Args>...> all{pick(std::get<kPlaces>(kept), next, threads)...};  // in their order
            if constexpr (std::is_void_v<R>) {
              std::apply(function, std::move(all));
              return true;
            } else {
              return std::apply(function, std::move(all));
            }
          },
          write};
}

template <class R, class... Args>
RecordedCall read(const char* name, R (*function)(Args...), ByteReader& from, std::vector<bool>* written) {
  std::tuple<std::remove_cvref_t<Args>...> kept{Argument<std::remove_cvref_t<Args>>::read(from)...};  // in their order
  if (from.left() != 0) throw Malformed("a call with more arguments than this library's");
  std::vector<RecordedOperand> operands;
  std::apply([&](const auto&... one) { (collect(one, &operands), ...); }, kept);
  for (const RecordedOperand& one : operands) written->push_back(one.written);
  return recorded(name, function, std::index_sequence_for<Args...>{}, std::move(kept));
}

}  // namespace recording

// Lets calls of a function be read from bytes. Tensors are `Operand`s, those that it writes `Answer`s, or lists of them; of
// what else it takes `Argument` knows how it is written.
template <class R, class... Args>
void add_call(const char* name, R (*function)(Args...)) {
  bound_calls().push_back({name, [name, function](ByteReader& from, std::vector<bool>* written) {
                             return recording::read(name, function, from, written);
                           }});
}

}  // namespace twofour
