// Posts between ranks that are threads of a test, as unhelpful as Post permits: nothing is read
// from a sender and nothing reaches a receiver before every rank does nothing but wait for
// something, and then one message or transfer moves, drawn from all that could. So memory that is
// changed before its transfer is over, an order that is taken for granted, or a byte too many
// changes results. What a transfer is to fill holds poison until it is there.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/post/post.h"
#include "comm/post/post_group.h"

namespace troupe::testing {

class LazyMail;

// What all ranks have asked of their posts.
struct LazyTraffic {
  struct Part {
    int from = 0;
    int to = 0;
    int64_t bytes = 0;

    bool operator==(const Part&) const = default;
  };
  std::vector<Part> received;  // transfers, in the order in which they were expected
};

// Runs body(rank, group) for every rank on a thread of its own, each with a group over such a post,
// and finishes the groups. `seed` draws what moves next. A failure of a rank is one of the test.
LazyTraffic run_lazily(int ranks, uint64_t seed,
                       const std::function<void(int rank, PostGroup& group)>& body);

}  // namespace troupe::testing
