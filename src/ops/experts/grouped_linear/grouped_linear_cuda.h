// The kernels of the products of experts on a GPU. Private to this folder.
#pragma once

#include <cstdint>

namespace troupe {

enum class GroupedVariant : uint8_t {
  plain,      // the tiles of product.cuh, for any dtype
  sm90,       // grouped_product_sm90.cuh
  sm90_pair,  // the same, in pairs of blocks that share tiles
};

}  // namespace troupe
