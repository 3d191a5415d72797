#include "graph.h"

#include <algorithm>

namespace twofour::ort {
namespace {

Setting read_setting(const Api& api, const Attribute* attribute) {
  Setting setting;
  int type = 0;
  api.check(api.OpAttr_GetType(attribute, &type));
  size_t bytes = 0;
  if (type == kIntAttribute) api.check(api.ReadOpAttr(attribute, type, &setting.whole, sizeof setting.whole, &bytes));
  if (type == kFloatAttribute) api.check(api.ReadOpAttr(attribute, type, &setting.real, sizeof setting.real, &bytes));
  if (type != kIntsAttribute && type != kStringAttribute) return setting;
  // Asked without room it says how many bytes there are, and calls that an error.
  if (Status* refused = api.ReadOpAttr(attribute, type, static_cast<void*>(nullptr), size_t{0}, &bytes)) api.ReleaseStatus(refused);
  if (type == kIntsAttribute) {
    setting.list.resize(bytes / sizeof(int64_t));
    if (bytes) api.check(api.ReadOpAttr(attribute, type, setting.list.data(), bytes, &bytes));
  } else {
    setting.text.resize(bytes);
    if (bytes) api.check(api.ReadOpAttr(attribute, type, setting.text.data(), bytes, &bytes));
    setting.text.resize(setting.text.find_last_not_of('\0') + 1);  // some versions of the runtime count the end of a C string
  }
  return setting;
}

std::map<std::string, Setting> read_settings(const Api& api, const NodeHandle* node) {
  std::map<std::string, Setting> settings;
  size_t count = 0;
  api.check(api.Node_GetNumAttributes(node, &count));
  std::vector<const Attribute*> attributes(count);
  if (count) api.check(api.Node_GetAttributes(node, attributes.data(), count));
  for (const Attribute* attribute : attributes) {
    if (!attribute) continue;
    const char* name = nullptr;
    api.check(api.OpAttr_GetName(attribute, &name));
    settings[name] = read_setting(api, attribute);
  }
  return settings;
}

Constant read_constant(const Api& api, const ValueInfo* info) {
  Constant constant;
  const Value* value = nullptr;
  if (Status* refused = api.ValueInfo_GetInitializerValue(info, &value)) {
    api.ReleaseStatus(refused);
    return constant;
  }
  if (!value) return constant;
  TensorInfo* tensor = nullptr;
  api.check(api.GetTensorTypeAndShape(value, &tensor));
  size_t axes = 0;
  Status* first = api.GetTensorElementType(tensor, &constant.type);
  Status* second = api.GetDimensionsCount(tensor, &axes);
  constant.shape.resize(axes);
  Status* third = api.GetDimensions(tensor, constant.shape.data(), axes);
  api.ReleaseTensorTypeAndShapeInfo(tensor);
  for (Status* status : {first, second, third}) api.check(status);
  if (constant.type == kFloat || constant.type == kInt64) api.check(api.GetTensorData(value, &constant.data));
  return constant;
}

}  // namespace

Graph::Graph(const Api& api, const GraphHandle* handle) : api_(api) {
  size_t count = 0;
  api.check(api.Graph_GetNumNodes(handle, &count));
  std::vector<const NodeHandle*> handles(count);
  if (count) api.check(api.Graph_GetNodes(handle, handles.data(), count));
  std::map<std::string, int> known;
  nodes.reserve(count);
  for (const NodeHandle* one : handles) {
    const char *name = nullptr, *kind = nullptr, *domain = nullptr;
    int since = 0;
    api.check(api.Node_GetName(one, &name));
    api.check(api.Node_GetOperatorType(one, &kind));
    api.check(api.Node_GetDomain(one, &domain));
    api.check(api.Node_GetSinceVersion(one, &since));
    const std::string where = domain;
    Node node{one, name, (where.empty() || where == "ai.onnx" ? "" : where + ".") + kind, since, {}, {}, {}};
    try {
      node.settings = read_settings(api, one);
    } catch (const Failed&) {
      node.kind.clear();  // one that the runtime does not show is left to it, the others of the graph are not
    }
    const int place = static_cast<int>(nodes.size());
    const auto read = [&](auto number, auto get) {
      size_t sizes = 0;
      api.check(number(&sizes));
      std::vector<const ValueInfo*> infos(sizes);
      if (sizes) api.check(get(infos.data(), sizes));
      std::vector<int> found;
      for (const ValueInfo* info : infos) found.push_back(info ? value_of(info, known) : -1);
      return found;
    };
    node.inputs = read([&](size_t* n) { return api.Node_GetNumInputs(one, n); },
                       [&](const ValueInfo** all, size_t n) { return api.Node_GetInputs(one, all, n); });
    node.outputs = read([&](size_t* n) { return api.Node_GetNumOutputs(one, n); },
                        [&](const ValueInfo** all, size_t n) { return api.Node_GetOutputs(one, all, n); });
    const auto inside = read([&](size_t* n) { return api.Node_GetNumImplicitInputs(one, n); },
                             [&](const ValueInfo** all, size_t n) { return api.Node_GetImplicitInputs(one, all, n); });
    for (const int value : node.inputs)
      if (value >= 0) values[static_cast<size_t>(value)].consumers.push_back(place);
    for (const int value : node.outputs)
      if (value >= 0) values[static_cast<size_t>(value)].producer = place;
    for (const int value : inside)
      if (value >= 0) values[static_cast<size_t>(value)].leaves = true;
    nodes.push_back(std::move(node));
  }
}

int Graph::value_of(const ValueInfo* info, std::map<std::string, int>& known) {
  const char* name = nullptr;
  api_.check(api_.GetValueInfoName(info, &name));
  if (!name || !*name) return -1;
  const auto [at, is_new] = known.try_emplace(name, static_cast<int>(values.size()));
  if (is_new) {
    GraphValue value;
    value.name = name, value.info = info;
    api_.check(api_.ValueInfo_IsGraphOutput(info, &value.leaves));
    api_.check(api_.ValueInfo_IsConstantInitializer(info, &value.constant));
    values.push_back(std::move(value));
  }
  return at->second;
}

const Constant* Graph::constant(int value) {
  if (value < 0 || !values[static_cast<size_t>(value)].constant) return nullptr;
  GraphValue& found = values[static_cast<size_t>(value)];
  if (!found.read.data) found.read = read_constant(api_, found.info);
  return found.read.data ? &found.read : nullptr;
}

const Node* Graph::producer(int value) const {
  const int node = value < 0 ? -1 : values[static_cast<size_t>(value)].producer;
  return node < 0 ? nullptr : &nodes[static_cast<size_t>(node)];
}

const Node* Graph::made_by(int value, const char* kind) const {
  const Node* node = producer(value);
  return node && node->kind == kind && node->outputs[0] == value ? node : nullptr;
}

const Node* Graph::only_reader(int value) const {
  const GraphValue& found = values[static_cast<size_t>(value)];
  return found.leaves || found.consumers.size() != 1 ? nullptr : &nodes[static_cast<size_t>(found.consumers[0])];
}

bool read_whole(const Constant* constant, std::vector<int64_t>* numbers) {
  if (!constant || constant->type != kInt64 || constant->shape.size() > 1 || constant->count() > kLongestList) return false;
  const auto* const data = static_cast<const int64_t*>(constant->data);
  numbers->assign(data, data + constant->count());
  return true;
}

bool read_scalar(const Constant* constant, float* number) {
  if (!constant || constant->type != kFloat || constant->shape.size() > 1 || constant->count() != 1) return false;
  *number = *static_cast<const float*>(constant->data);
  return true;
}

}  // namespace twofour::ort
