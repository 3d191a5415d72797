// The plug-in: what ONNX Runtime calls of a library that is registered with it, and what it is answered.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "native/operand.h"
#include "native/runtime/calls.h"
#include "program.h"

namespace twofour::ort {
namespace {

constexpr const char* kName = "TwoFourExecutionProvider";
constexpr const char* kThreadsOption = "ep.twofourexecutionprovider.threads";
constexpr const char* kSpinningOption = "session.intra_op.allow_spinning";
constexpr long kMostThreads = 1024;

// Runs `body`; what it throws becomes a status. Nothing leaves as an exception.
template <class Body>
Status* guarded(const Api& api, const Body& body) noexcept {
  const auto failed = [&](const char* what) { return api.CreateStatus(kFail, what); };
  try {
    try {
      body();
      return nullptr;
    } catch (const Refusal& refusal) {
      return failed(("twofour: " + refusal.what + "; got " + refusal.got + "; wanted " + refusal.wanted +
                     (refusal.remedy.empty() ? "" : "; " + refusal.remedy)).c_str());
    } catch (const std::bad_alloc&) {
      return failed("twofour: the system grants no memory");
    } catch (const std::exception& thrown) {
      return failed((std::string("twofour: ") + thrown.what()).c_str());
    }
  } catch (...) {
    return failed("twofour: an exception without a text, or no memory for the text of one");
  }
}

void log(const Api& api, const Logger* logger, int severity, const std::string& text) {
  const PathChar nowhere[] = {0};
  if (Status* refused = api.Logger_LogMessage(logger, severity, ("twofour: " + text).c_str(), nowhere, 0, "provider")) api.ReleaseStatus(refused);
}

struct Compiled : ComputeInfo {
  const Api* api;
  std::unique_ptr<Program> program;

  Compiled(const Api* api, std::unique_ptr<Program> made) : ComputeInfo{}, api(api), program(std::move(made)) {
    create_state = [](ComputeInfo* self, ComputeContext*, void** state) -> Status* { return *state = self, nullptr; };
    compute = [](ComputeInfo*, void* state, KernelContext* context) {
      auto& self = *static_cast<Compiled*>(static_cast<ComputeInfo*>(state));
      return guarded(*self.api, [&] { self.program->run(*self.api, context); });
    };
    release_state = [](ComputeInfo*, void*) {};
  }
};

class Provider : public Ep {
 public:
  Provider(const Api* api, const Logger* logger, int threads) : api_(api), logger_(logger), threads_(threads) {
    name = [](const Ep*) { return kName; };
    get_capability = [](Ep* self, const GraphHandle* graph, SupportInfo* support) {
      auto& provider = *static_cast<Provider*>(self);
      return guarded(*provider.api_, [&] { provider.choose(graph, support); });
    };
    compile = [](Ep* self, const GraphHandle** graphs, const NodeHandle** fused, size_t count, ComputeInfo** infos, NodeHandle**) {
      auto& provider = *static_cast<Provider*>(self);
      return guarded(*provider.api_, [&] {
        for (size_t i = 0; i < count; i++)
          infos[i] = new Compiled(provider.api_, compiled(*provider.api_, provider.claim_of(fused[i]), graphs[i], fused[i], provider.threads_));
      });
    };
    release_compute_infos = [](Ep*, ComputeInfo** infos, size_t count) {
      for (size_t i = 0; i < count; i++) delete static_cast<Compiled*>(infos[i]);
    };
  }

 private:
  void choose(const GraphHandle* handle, SupportInfo* support) {
    Graph graph(*api_, handle);
    const Matches found = match(graph);
    const FusionOptions options;
    std::vector<std::string> all;
    for (const GraphValue& value : graph.values) all.push_back(value.name);
    const auto names = Shared<std::vector<std::string>>::make(std::move(all));
    for (const Match& one : found.all) {
      std::vector<const NodeHandle*> nodes;
      for (const int node : one.nodes) nodes.push_back(graph.nodes[static_cast<size_t>(node)].handle);
      api_->check(api_->GetEpApi()->AddNodesToFuse(support, nodes.data(), nodes.size(), &options));
      log(kInfo, text_of(graph, one));
      claims_.insert_or_assign((*names)[static_cast<size_t>(one.out())], Claim{one, names});
    }
    for (const std::string& reason : found.reasons) log(kInfo, reason + ": left to another provider");
    // The runtime asks again for what is left, and for each branch: a session that runs parts here needs no warning.
    if (claims_.empty() && !found.reasons.empty())
      log(kWarning, "no weight of this graph is 2:4 along the axis summed over: all of it is left to other providers (" + found.reasons[0] + ")");
  }
  // By the name of what the node that stands for it answers.
  const Claim& claim_of(const NodeHandle* fused) const {
    size_t count = 0;
    api_->check(api_->Node_GetNumOutputs(fused, &count));
    std::vector<const ValueInfo*> outputs(count);
    if (count) api_->check(api_->Node_GetOutputs(fused, outputs.data(), count));
    for (const ValueInfo* output : outputs) {
      const char* name = nullptr;
      if (output) api_->check(api_->GetValueInfoName(output, &name));
      if (const auto found = name ? claims_.find(name) : claims_.end(); found != claims_.end()) return found->second;
    }
    throw Failed("a node stands for what was not chosen");
  }
  std::string text_of(const Graph& graph, const Match& one) const {
    const Projection* first = one.start();
    const std::string where = "`" + graph.values[static_cast<size_t>(one.out())].name + "`";
    const std::string size = first ? " of weights (" + std::to_string(first->dense.out) + ", " + std::to_string(first->dense.in) + ")" : "";
    std::string what = first ? "attention with its products" : "attention";
    if (one.product) what = one.product->first ? "two products" : "a product";
    return what + size + " at " + where + ": " +
           std::to_string(one.nodes.size()) + " nodes run here on " + std::to_string(threads_) + (threads_ == 1 ? " thread" : " threads");
  }
  void log(int severity, const std::string& text) const { ort::log(*api_, logger_, severity, text); }

  const Api* api_;
  const Logger* logger_;
  int threads_;
  std::map<std::string, Claim> claims_;
};

// A session's entry, empty where it has none; longer ones are errors of the runtime's.
std::string entry_of(const Api& api, const SessionOptions* options, const char* key) {
  int has = 0;
  api.check(api.HasSessionConfigEntry(options, key, &has));
  char text[16] = {};
  size_t bytes = sizeof text;
  if (has) api.check(api.GetSessionConfigEntry(options, key, text, &bytes));
  return text;
}

int threads_of(const Api& api, const SessionOptions* options, const Logger* logger) {
  const std::string text = entry_of(api, options, kThreadsOption);
  if (text.empty()) return 1;
  char* end = nullptr;
  const long threads = std::strtol(text.c_str(), &end, 10);
  if (end == text.c_str() || *end || threads < 1 || threads > kMostThreads)
    throw Failed("the option `threads` is '" + text + "'; wanted a number from 1 to 1024");
  if (threads > 1 && entry_of(api, options, kSpinningOption) != "0")
    log(api, logger, kWarning, std::string("threads of ONNX Runtime that spin while they wait take the cores that threads here need: set `") +
                                   kSpinningOption + "` to \"0\"");
  return static_cast<int>(threads);
}

class Plugin : public Factory {
 public:
  explicit Plugin(const Api* api) : api_(api) {
    name = [](const Factory*) { return kName; };
    vendor = [](const Factory*) { return "twofour"; };
    library_version = [](const Factory*) { return TWOFOUR_LIBRARY_VERSION; };
    vendor_id = [](const Factory*) { return uint32_t{0}; };
    is_stream_aware = [](const Factory*) { return false; };
    create_allocator = [](Factory*, const void*, const KeyValuePairs*, void** none) -> Status* { return *none = nullptr, nullptr; };
    release_allocator = [](Factory*, void*) {};
    create_data_transfer = [](Factory*, void** none) -> Status* { return *none = nullptr, nullptr; };
    supported_devices = [](Factory* self, const HardwareDevice* const* devices, size_t count, EpDevice** found, size_t most, size_t* number) {
      const Api& api = *static_cast<Plugin*>(self)->api_;
      *number = 0;
      return guarded(api, [&] {
        for (size_t i = 0; i < count && *number < most; i++) {
          if (api.HardwareDevice_Type(devices[i]) != kCpu) continue;
          const KeyValuePairs* const none = nullptr;
          api.check(api.GetEpApi()->CreateEpDevice(self, devices[i], none, none, &found[*number]));
          ++*number;
        }
      });
    };
    create = [](Factory* self, const HardwareDevice* const*, const KeyValuePairs* const*, size_t, const SessionOptions* options,
                const Logger* logger, Ep** made) {
      const Api* api = static_cast<Plugin*>(self)->api_;
      *made = nullptr;
      return guarded(*api, [&] {
        add_calls();
        *made = new Provider(api, logger, threads_of(*api, options, logger));
      });
    };
    release = [](Factory*, Ep* made) { delete static_cast<Provider*>(made); };
  }

 private:
  const Api* api_;
};

}  // namespace
}  // namespace twofour::ort

#if defined(_WIN32)
#define TWOFOUR_PLUGIN extern "C" __declspec(dllexport)
#else
#define TWOFOUR_PLUGIN extern "C" __attribute__((visibility("default")))
#endif

using namespace twofour::ort;

TWOFOUR_PLUGIN Status* CreateEpFactories(const char*, const ApiBase* base, const Logger*, Factory** factories, size_t most, size_t* count) {
  *count = 0;
  // 1.23.0 takes every plug-in for a device of its own, and finds no way to copy tensors there.
  const Api* api = std::strcmp(base->version(), "1.23.0") == 0 ? nullptr : base->get(kVersion);
  if (!api) {
    const Api* oldest = base->get(1);
    const std::string text = std::string("twofour: this is ONNX Runtime ") + base->version() + "; wanted 1.23.1 or newer";
    return oldest ? oldest->CreateStatus(kFail, text.c_str()) : nullptr;
  }
  return guarded(*api, [&] {
    if (most < 1) throw Failed("no room for a factory");
    factories[0] = new Plugin(api);
    *count = 1;
  });
}

TWOFOUR_PLUGIN Status* ReleaseEpFactory(Factory* factory) {
  delete static_cast<Plugin*>(factory);
  return nullptr;
}
