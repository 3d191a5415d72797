// A match that runs: its weights packed, its operands by their places among those of the node that stands for it.
#pragma once

#include <memory>

#include "match.h"
#include "native/shared.h"

namespace twofour::ort {

class Program {
 public:
  virtual ~Program() = default;
  // Several threads may call it. Throws Failed, a Refusal or bad_alloc.
  virtual void run(const Api& api, KernelContext* context) = 0;
};

// A match in a graph, which may be gone: what is needed of that is the names of its values.
struct Claim {
  Match match;
  Shared<std::vector<std::string>> names;
};

// `graph`: the nodes of the claim alone, with its constants; `fused`: the node that stands for it.
std::unique_ptr<Program> compiled(const Api& api, const Claim& claim, const GraphHandle* graph, const NodeHandle* fused, int threads);

}  // namespace twofour::ort
