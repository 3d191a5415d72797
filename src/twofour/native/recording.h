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

// Who is told of this thread's calls, with the step and the list of its tensors; nobody is null.
nanobind::handle recorder();
void tell_recorder(RecordedCall step, const std::vector<Operand>& operands);

namespace recording {

inline void collect(const Operand& one, std::vector<Operand>* all) { all->push_back(one); }
inline void collect(const Operands& several, std::vector<Operand>* all) {
  for (size_t i = 0; i < several.size(); i++) all->push_back(several[i]);
}
template <class Other>
void collect(const Other&, std::vector<Operand>*) {}

inline const Operand& pick(const Operand&, const Operand*& next) { return *next++; }
inline Operands pick(const Operands& kept, const Operand*& next) {
  Operands several;
  for (size_t i = 0; i < kept.size(); i++) several.push_back(*next++);
  return several;
}
template <class Other>
const Other& pick(const Other& kept, const Operand*&) {
  return kept;
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

// Binds a function to a module or class. Every operand is an `Operand` or `Operands`; what else it takes is kept.
template <class Scope, class R, class... Args>
void bind_call(Scope&& scope, const char* name, R (*function)(Args...)) {
  scope.def(name, [name, function](std::remove_cvref_t<Args>... given) -> R {
    if (!recorder().is_valid()) return function(given...);
    if constexpr (!std::is_void_v<R>) {
      if (!function(given...)) return false;
    } else {
      function(given...);
    }
    std::vector<Operand> operands;
    (recording::collect(given, &operands), ...);
    tell_recorder(recording::recorded(name, function, std::index_sequence_for<Args...>{}, given...), operands);
    if constexpr (!std::is_void_v<R>) return true;
  });
}

}  // namespace twofour
