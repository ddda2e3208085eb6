// Picks the table of loops of the level that runs here, among those that are compiled.
#include <type_traits>

#include "compiled_levels.h"  // written by CMakeLists.txt
#include "kept_product_loops.h"
#include "order_key_loops.h"
#include "ratio_loops.h"
#include "simd_level.h"
#include "softmax_rows.h"
#include "wide_product.h"

#define D3S_DECLARE(level, table)                                       \
  namespace level {                                                     \
  extern const std::remove_reference_t<decltype(::d3s::table())> table; \
  }
#define D3S_IF_IT_RUNS(level, table) \
  if (here >= SimdLevel::level) best = &level::table;
#define D3S_PICK(Table, table, LEVELS)   \
  LEVELS(D3S_DECLARE, table)             \
  const Table& table() {                 \
    const SimdLevel here = simd_level(); \
    const Table* best = nullptr;         \
    LEVELS(D3S_IF_IT_RUNS, table)        \
    return *best;                        \
  }
#define D3S_ALL_LEVELS(X, table) D3S_LEVELS(X, table) D3S_BF16_LEVELS(X, table)

namespace d3s {

D3S_PICK(SoftmaxRows, softmax_rows, D3S_LEVELS)
D3S_PICK(KeptProducts, kept_products, D3S_LEVELS)
D3S_PICK(RatioLoops, ratio_loops, D3S_LEVELS)
D3S_PICK(OrderKeyLoops, order_key_loops, D3S_LEVELS)
D3S_PICK(WideProduct, wide_product, D3S_ALL_LEVELS)

}  // namespace d3s
