// Python as bind.cc files see it: nanobind, the borders' tensors and recorded calls, or, where TWOFOUR_WITHOUT_PYTHON is
// defined, nothing: the same files then only add their rows and calls to the tables of a library without Python.
#pragma once

#include "recording.h"

#ifdef TWOFOUR_WITHOUT_PYTHON

namespace twofour::unbound {

// Takes what Python would be told.
struct Ignored {
  template <class... Given>
  Ignored(const Given&...) {}
  template <class Given>
  Ignored& operator=(const Given&) { return *this; }
  template <class... Given>
  Ignored& def(const Given&...) { return *this; }
  template <class Given>
  void append(const Given&) {}
  template <class Given>
  Ignored operator[](const Given&) { return {}; }
  Ignored attr(const char*) { return {}; }
};
using module_ = Ignored;
using list = Ignored;
using dict = Ignored;
template <class>
using class_ = Ignored;
template <class...>
struct init {};
template <class... Given>
Ignored make_tuple(const Given&...) { return {}; }

}  // namespace twofour::unbound

namespace nb = twofour::unbound;

namespace twofour {

inline void append_to(nb::module_&, const char*, const nb::list&) {}

template <class Scope, class R, class... Args>
void bind_call(Scope&&, const char* name, R (*function)(Args...), const char* recorded_as = nullptr) {
  add_call(recorded_as ? recorded_as : name, function);
}

}  // namespace twofour

#else

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace nanobind::detail {

template <>
struct has_arg_defaults<twofour::Operand> : std::true_type {};  // None is passed on
template <>
struct has_arg_defaults<twofour::Answer> : std::true_type {};

template <class One>
struct operand_caster {
  NB_TYPE_CASTER(One, const_name("torch.Tensor | None"))
  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    value.tensor = src.is_none() ? nullptr : src.ptr();
    return true;
  }
};
template <>
struct type_caster<twofour::Operand> : operand_caster<twofour::Operand> {};
template <>
struct type_caster<twofour::Answer> : operand_caster<twofour::Answer> {};

template <class One>
struct type_caster<twofour::ListOf<One>> {
  NB_TYPE_CASTER(twofour::ListOf<One>, const_name("list[torch.Tensor]"))
  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    if (!isinstance<list>(src)) return false;
    for (const handle one : borrow<list>(src)) value.emplace_back().tensor = one.is_none() ? nullptr : one.ptr();
    return true;
  }
};

template <class One>
struct type_caster<One, enable_if_t<std::is_base_of_v<twofour::NumberArgument, One>>> {
  NB_TYPE_CASTER(One, const_name("int"))
  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<int> number;
    if (!number.from_python(src, flags, cleanup)) return false;
    value.value = number.value;
    return true;
  }
};

}  // namespace nanobind::detail

namespace twofour {

// Who is told of this thread's calls: the call, its tensors, and for each whether it is written; nobody is null.
nb::handle recorder();
void tell_recorder(RecordedCall call, const std::vector<RecordedOperand>& operands);

// Adds items to a list that a module has by that name, or gets.
inline void append_to(nb::module_& m, const char* name, const nb::list& items) {
  if (!nb::hasattr(m, name)) m.attr(name) = nb::list();
  nb::cast<nb::list>(m.attr(name)).extend(items);
}

// Binds a function to a module or class so that its calls can be recorded (`add_call`), under its name or another one.
template <class Scope, class R, class... Args>
void bind_call(Scope&& scope, const char* name, R (*function)(Args...), const char* recorded_as = nullptr) {
  if (!recorded_as) recorded_as = name;
  add_call(recorded_as, function);
  scope.def(name, [recorded_as, function](std::remove_cvref_t<Args>... given) -> R {
    if (!recorder().is_valid()) return function(given...);
    if constexpr (!std::is_void_v<R>) {
      if (!function(given...)) return false;
    } else {
      function(given...);
    }
    std::vector<RecordedOperand> operands;
    (recording::collect(given, &operands), ...);
    tell_recorder(recording::recorded(recorded_as, function, std::index_sequence_for<Args...>{},
                                      std::tuple<std::remove_cvref_t<Args>...>(given...)), operands);
    if constexpr (!std::is_void_v<R>) return true;
  });
}

}  // namespace twofour

#endif
