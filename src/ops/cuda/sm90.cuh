// Hopper's own instructions (compute capability 9.0, target sm_90a), one function each: memory
// barriers in shared memory, copies of tensor tiles (TMA), and matrix products of warpgroups
// (wgmma). The names of the instructions are those of the PTX manual, which has their full
// contracts. Only for device code that is compiled for sm_90a.
//
// Shared memory is addressed as the instructions do, with 32 bits (shared_address). A warpgroup is
// four warps, the first of which has a number that is a multiple of four.
//
// Tiles lie in shared memory in rows of 128 bytes, swizzled: the 16 bytes number c of row r are
// found at place c ^ (r % 8) of the row. Tiles begin at multiples of 1024 bytes (tensor_map.h).
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace troupe::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Barriers (mbarrier): an 8-byte word in shared memory that counts arrivals and bytes. A phase
// ends when `arrivals` threads have arrived and all expected bytes have come; phases are told apart
// by their parity, 0 first.

// mbarrier.init, by one thread; then fence_barriers, and a synchronisation of all who use it.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: other blocks of the cluster and copies see the barriers initialised.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive at the same barrier of block `rank` of the cluster. It says that this thread is
// done with what it has waited for, and orders none of its other writes for that block: a release
// for the whole cluster would wait for all that the thread has under way, in global memory, too.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and the phase also waits for `bytes` of copies.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// bar.sync: `threads` threads, a multiple of 32, meet at barrier `number` (1 to 15) of the block.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// barrier.cluster: all threads of the cluster meet, and see each other's shared memory.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Copies of tiles, by one thread. `map` is a kernel parameter (__grid_constant__); x, y, z count
// elements from the first one of the tensor, innermost dimension first. What lies outside of the
// tensor arrives as zeros, counts as bytes all the same, and is not written.

// prefetch.tensormap
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor from global to shared memory; its bytes arrive at `barrier`.
__device__ __forceinline__ void load_tile(const CUtensorMap& map, uint32_t barrier, uint32_t to,
                                          int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same from a tensor of four dimensions.
__device__ __forceinline__ void load_tile(const CUtensorMap& map, uint32_t barrier, uint32_t to,
                                          int32_t x, int32_t y, int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// cp.async.bulk from global to shared memory; `bytes` and both addresses are multiples of 16. The
// bytes arrive at `barrier`.
__device__ __forceinline__ void load_bytes(uint32_t barrier, uint32_t to, const void* from,
                                           uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same to the same address of all blocks of the cluster whose bit is set in `blocks`; in each,
// the bytes arrive at its own barrier.
__device__ __forceinline__ void load_tile_to(uint16_t blocks, const CUtensorMap& map,
                                             uint32_t barrier, uint32_t to, int32_t x, int32_t y,
                                             int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}

// cp.async.bulk.tensor from shared to global memory. The tile must be visible to copies
// (fence_copies) before.
__device__ __forceinline__ void store_tile(const CUtensorMap& map, uint32_t from, int32_t x,
                                           int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// cp.async.bulk from shared to global memory, and cp.reduce.async.bulk, which adds fp32 numbers to
// what is there; `bytes` and both addresses are multiples of 16. What is read must be visible to
// copies before.
__device__ __forceinline__ void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_numbers(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// cp.async.bulk.commit_group: makes a group, possibly empty, of this thread's stores since the
// last.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read: of this thread's groups, all but the last kPending have read their
// shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: this thread's stores have been made.
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// fence.proxy.async: what this thread has written to shared memory can be read by copies and
// products, once their threads have synchronised with this one.
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async for all memory: orders what this thread has seen before what its copies do
// after it, and the other way round.
__device__ __forceinline__ void fence_all_copies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Turns of blocks: a number in global memory. wait_turn waits until it has the value; what the
// thread that passed it on had done before is seen then.
__device__ __forceinline__ void wait_turn(const int32_t* turn, int32_t value) {
  int32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != value);
}
__device__ __forceinline__ void pass_turn(int32_t* turn, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

// setmaxnreg, by all threads of a warpgroup: gives registers back, or waits for more of them.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// stmatrix.x4: four matrices of 8 x 8 elements of two bytes. Lane l gives the address of row l % 8
// of matrix l / 8, and in register i elements 2 (l % 4) and on of row l / 4 of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&registers)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, int4 value) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ int4 load_shared(uint32_t address) {
  int4 value;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Products of a warpgroup, in all of whose threads the functions below are called alike.

// What wgmma reads of an operand in shared memory. With the depth within the rows of 128 bytes:
// 64 elements of depth, every 8 rows (of the product's rows or columns) 1024 bytes after the last;
// 16 elements deeper is 32 bytes on. With the product's rows or columns within the rows of 128
// bytes: tiles of 64 of them, `leading` bytes apart, in which every 8 elements of depth are 1024
// bytes after the last; 16 elements deeper is 2048 bytes on.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading) {
  constexpr uint64_t kStride = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | kStride << 32 | kSwizzle128 << 62;
}

// wgmma.fence: before the first product, and when others than products have touched the sums.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: makes a group of the products since the last.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: all groups but the last kPending are done, operands and sums.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After a wait: what the compiler does with the sums stays after it.
template <int kCount>
__device__ __forceinline__ void order_sums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// wgmma.mma_async: sums [64, kColumns] = (add ? sums : 0) + left [64, 16] right [16, kColumns], of
// bf16, those of 256 columns also of f16, summed in fp32. k...RowsFirst: the operand's tiles have
// the product's rows (columns) within the rows of 128 bytes, rather than the depth. Warp w of the
// warpgroup has rows 16 w to 16 w + 15: of them, lane l has columns 8 j + 2 (l % 4) and the next,
// of row l / 4 in sums[4 j] and [4 j + 1], of row l / 4 + 8 in the two after them.
#define TROUPE_SUMS(i)                                                                      \
  "+f"(sums[(i)]), "+f"(sums[(i) + 1]), "+f"(sums[(i) + 2]), "+f"(sums[(i) + 3]),           \
      "+f"(sums[(i) + 4]), "+f"(sums[(i) + 5]), "+f"(sums[(i) + 6]), "+f"(sums[(i) + 7]),   \
      "+f"(sums[(i) + 8]), "+f"(sums[(i) + 9]), "+f"(sums[(i) + 10]), "+f"(sums[(i) + 11]), \
      "+f"(sums[(i) + 12]), "+f"(sums[(i) + 13]), "+f"(sums[(i) + 14]), "+f"(sums[(i) + 15])

template <int kColumns, bool kLeftRowsFirst, bool kRightColumnsFirst, class Element = __nv_bfloat16>
__device__ __forceinline__ void multiply_add(float (&sums)[kColumns / 2], uint64_t left,
                                             uint64_t right, int add) {
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
  static_assert(std::is_same_v<Element, __nv_bfloat16> || kColumns == 256);
  if constexpr (kColumns == 64) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, add, 1, 1, %35, %36;\n"
        "}\n"
        : TROUPE_SUMS(0), TROUPE_SUMS(16)
        : "l"(left), "l"(right), "r"(add), "n"(kLeftRowsFirst ? 1 : 0),
          "n"(kRightColumnsFirst ? 1 : 0));
  } else if constexpr (kColumns == 128) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, %64, %65, add, 1, 1, %67, %68;\n"
        "}\n"
        : TROUPE_SUMS(0), TROUPE_SUMS(16), TROUPE_SUMS(32), TROUPE_SUMS(48)
        : "l"(left), "l"(right), "r"(add), "n"(kLeftRowsFirst ? 1 : 0),
          "n"(kRightColumnsFirst ? 1 : 0));
  } else {
#define TROUPE_MULTIPLY(types)                                                              \
  asm volatile(                                                                             \
      "{\n"                                                                                 \
      ".reg .pred add;\n"                                                                   \
      "setp.ne.b32 add, %130, 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                  \
      " {"                                                                                  \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "         \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "         \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "         \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "         \
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "         \
      "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "         \
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "        \
      "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "      \
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"                                \
      "}, %128, %129, add, 1, 1, %131, %132;\n"                                             \
      "}\n"                                                                                 \
      : TROUPE_SUMS(0), TROUPE_SUMS(16), TROUPE_SUMS(32), TROUPE_SUMS(48), TROUPE_SUMS(64), \
        TROUPE_SUMS(80), TROUPE_SUMS(96), TROUPE_SUMS(112)                                  \
      : "l"(left), "l"(right), "r"(add), "n"(kLeftRowsFirst ? 1 : 0),                       \
        "n"(kRightColumnsFirst ? 1 : 0))
    if constexpr (std::is_same_v<Element, __half>) {
      TROUPE_MULTIPLY("f16.f16");
    } else {
      TROUPE_MULTIPLY("bf16.bf16");
    }
#undef TROUPE_MULTIPLY
  }
}

// The same with the left operand in registers, which must stay as they are until the product is
// done; it is always added. Lane l of warp w has of rows 16 w + l / 4 (left[0], left[2]) and 8 rows
// further (left[1], left[3]) the depths 2 (l % 4) and the next, in left[2] and left[3] those 8
// deeper: what pack_left() makes of sums.
template <int kColumns, bool kRightColumnsFirst>
__device__ __forceinline__ void multiply_add(float (&sums)[kColumns / 2], const uint32_t (&left)[4],
                                             uint64_t right) {
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 192);
  if constexpr (kColumns == 64) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n"
        : TROUPE_SUMS(0), TROUPE_SUMS(16)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),
          "n"(kRightColumnsFirst ? 1 : 0));
  } else if constexpr (kColumns == 192) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, "
        "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "
        "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
        "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "
        "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, 1, 1, 1, %101;\n"
        : TROUPE_SUMS(0), TROUPE_SUMS(16), TROUPE_SUMS(32), TROUPE_SUMS(48), TROUPE_SUMS(64),
          TROUPE_SUMS(80)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),
          "n"(kRightColumnsFirst ? 1 : 0));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;\n"
        : TROUPE_SUMS(0), TROUPE_SUMS(16), TROUPE_SUMS(32), TROUPE_SUMS(48)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),
          "n"(kRightColumnsFirst ? 1 : 0));
  }
}

// wgmma.mma_async of codes: sums [64, 128] = (add ? sums : 0) + left [64, 32] right [32, 128], both
// with the depth within their rows of 128 bytes; right is e4m3, left e5m2 or e4m3. The sums are
// spread over threads as above.
template <bool kLeftE5m2>
__device__ __forceinline__ void multiply_add_codes(float (&sums)[64], uint64_t left, uint64_t right,
                                                   int add) {
#define TROUPE_MULTIPLY_CODES(types)                                                \
  asm volatile(                                                                     \
      "{\n"                                                                         \
      ".reg .pred add;\n"                                                           \
      "setp.ne.b32 add, %66, 0;\n"                                                  \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                          \
      " {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
      "%62, %63"                                                                    \
      "}, %64, %65, add, 1, 1;\n"                                                   \
      "}\n"                                                                         \
      : TROUPE_SUMS(0), TROUPE_SUMS(16), TROUPE_SUMS(32), TROUPE_SUMS(48)           \
      : "l"(left), "l"(right), "r"(add))
  if constexpr (kLeftE5m2) {
    TROUPE_MULTIPLY_CODES("e5m2.e4m3");
  } else {
    TROUPE_MULTIPLY_CODES("e4m3.e4m3");
  }
#undef TROUPE_MULTIPLY_CODES
}

#undef TROUPE_SUMS

// Sums of 16 columns (multiply_add) in bf16, as the left operand of a product 16 deep.
__device__ __forceinline__ void pack_left(const float* sums, uint32_t (&left)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
    left[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// A stage of a ring and the parity of its turn.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void move_to(uint32_t block) {
    stage = static_cast<int>(block % kStages);
    parity = block / kStages & 1;
  }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace troupe::sm90
