// Native calls that can be recorded and run again: a function bound by `bind_call` is one for Python, and a `RecordedCall` for an
// executor, which hands it descriptors in place of tensors. The border looks at both alike.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "operand.h"

namespace twofour {

// One call without its operands: `run` takes as many as there were. False: a weight is not what it was.
struct RecordedCall {
  std::string name;
  std::function<bool(const Operand*)> run;
};

// Who is told of this thread's calls: the call, its tensors, and for each whether it is written; nobody is null.
nanobind::handle recorder();
struct RecordedOperand {
  Operand operand;
  bool written;
};
void tell_recorder(RecordedCall call, const std::vector<RecordedOperand>& operands);

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
One pick(const One& kept, const Operand*& next) {
  if constexpr (std::is_base_of_v<Operand, One>) return One{*next++};
  else return kept;
}
template <class One>
ListOf<One> pick(const ListOf<One>& kept, const Operand*& next) {
  ListOf<One> several;
  for (size_t i = 0; i < kept.size(); i++) several.push_back(One{*next++});
  return several;
}

template <class R, class... Args, size_t... kPlaces>
RecordedCall recorded(const char* name, R (*function)(Args...), std::index_sequence<kPlaces...>,
             const std::remove_cvref_t<Args>&... given) {
  return {name, [function, kept = std::tuple<std::remove_cvref_t<Args>...>(given...)](const Operand* next) {
            std::tuple<std::remove_cvref_t<Args>...> all{pick(std::get<kPlaces>(kept), next)...};  // in their order
            if constexpr (std::is_void_v<R>) {
              std::apply(function, std::move(all));
              return true;
            } else {
              return std::apply(function, std::move(all));
            }
          }};
}

}  // namespace recording

// Binds a function to a module or class. Tensors are `Operand`s, those that it writes `Answer`s, or lists of
// them; what else it takes is kept.
template <class Scope, class R, class... Args>
void bind_call(Scope&& scope, const char* name, R (*function)(Args...)) {
  scope.def(name, [name, function](std::remove_cvref_t<Args>... given) -> R {
    if (!recorder().is_valid()) return function(given...);
    if constexpr (!std::is_void_v<R>) {
      if (!function(given...)) return false;
    } else {
      function(given...);
    }
    std::vector<RecordedOperand> operands;
    (recording::collect(given, &operands), ...);
    tell_recorder(recording::recorded(name, function, std::index_sequence_for<Args...>{}, given...), operands);
    if constexpr (!std::is_void_v<R>) return true;
  });
}

}  // namespace twofour
