// A graph of ONNX as the matching reads it: values by number, what makes and reads each, constants, attributes. The runtime's
// own objects are asked once.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ort.h"

namespace twofour::ort {

struct Setting {
  int64_t whole = 0;
  float real = 0;
  std::vector<int64_t> list;
  std::string text;
};

struct Node {
  const NodeHandle* handle;
  std::string name, kind;  // `kind`: its domain in front unless that is ONNX's own; empty where attributes are not readable
  int since;               // version of the operator set that defined it
  std::vector<int> inputs, outputs;  // values, -1 for one that is left out
  std::map<std::string, Setting> settings;

  int64_t whole(const char* setting, int64_t otherwise) const {
    const auto found = settings.find(setting);
    return found == settings.end() ? otherwise : found->second.whole;
  }
  float real(const char* setting, float otherwise) const {
    const auto found = settings.find(setting);
    return found == settings.end() ? otherwise : found->second.real;
  }
  int input(size_t index) const { return index < inputs.size() ? inputs[index] : -1; }
};

struct Constant {
  int type = 0;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // null where the value is none

  int64_t count() const {
    int64_t all = 1;
    for (const int64_t size : shape) all *= size;
    return all;
  }
};

struct GraphValue {
  std::string name;
  int producer = -1;
  std::vector<int> consumers;  // nodes, one entry for each time they read it
  bool leaves = false;         // the graph's answer, or read inside a subgraph
  bool constant = false;
  const ValueInfo* info = nullptr;
  Constant read = {};          // filled when it is asked for: the runtime may have to make a copy
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<GraphValue> values;

  // The runtime's graph is to outlive it.
  Graph(const Api& api, const GraphHandle* handle);

  // A constant, of float32 or int64; null for any other value.
  const Constant* constant(int value);
  // Whether a value is a constant, of any type: the runtime hands none over at a run, read or not.
  bool is_constant(int value) const { return value >= 0 && values[static_cast<size_t>(value)].constant; }
  // Whether anything reads a value: the runtime drops one that nothing does from what a node that stands for others answers.
  bool is_read(int value) const {
    return value >= 0 && (values[static_cast<size_t>(value)].leaves || !values[static_cast<size_t>(value)].consumers.empty());
  }
  // The node that makes a value, or null; and if it is of that kind.
  const Node* producer(int value) const;
  const Node* made_by(int value, const char* kind) const;
  int index(const Node& node) const { return static_cast<int>(&node - nodes.data()); }
  // The only node that reads a value which does not leave the graph.
  const Node* only_reader(int value) const;

 private:
  int value_of(const ValueInfo* info, std::map<std::string, int>& known);

  const Api& api_;
};

constexpr int64_t kLongestList = 8;
// Elements of a constant of whole numbers; false where it is none or longer than any list of sizes.
bool read_whole(const Constant* constant, std::vector<int64_t>* numbers);
// A float32 constant of one number, in one axis at most: more axes would join those of what it is added to; false where it is none.
bool read_scalar(const Constant* constant, float* number);

}  // namespace twofour::ort
