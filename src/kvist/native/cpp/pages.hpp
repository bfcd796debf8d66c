// Moves KV between engine pages and canonical blocks: a table of byte offsets per kind says where
// each unit of a head's page lies in the engine's layout.
//
// Runs of units that lie side by side in the engine are found first and moved as one longer unit:
// a table that is the identity becomes one copy a head. Work is shared out by (block, layer), or by
// block where a checksum of each is wanted, which is then taken of the bytes as they pass.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "copy_run.hpp"
#include "hash_xxh3.hpp"
#include "tiles.hpp"

namespace kvist::pages {

// The map as the caller gives it; arrays are borrowed. See kvist/native/pagemap.py.
struct Map {
  const std::uint64_t* layers;
  std::size_t layer_count;
  std::int64_t page_stride_bytes;
  const std::uint32_t* tables;  // (kinds, units)
  std::size_t kinds, units;
  const std::int64_t* head_offsets;  // (kinds, heads)
  std::size_t heads;
  std::size_t unit_bytes, block_heads, first_head, page_tokens;
};

struct Job {
  bool gather;
  const std::uint64_t* slots;  // (blocks,)
  const std::int64_t* pages;   // (blocks, columns)
  std::size_t blocks, columns;
};

// One kind's table after runs were joined: fewer units of more bytes, or tiles.
struct Joined {
  std::vector<std::uint32_t> table;
  std::size_t unit_bytes;
  std::optional<Tiles> tiles;
};

// Keys and values may be packed differently, so each kind is joined for itself.
inline std::vector<Joined> join_runs(const Map& map) {
  std::vector<Joined> kinds;
  for (std::size_t k = 0; k < map.kinds; ++k) {
    const std::uint32_t* table = map.tables + k * map.units;
    std::size_t run = map.units;
    for (std::size_t u = 1; u < map.units && run > 1; ++u) {
      const std::uint64_t next = static_cast<std::uint64_t>(table[u - 1]) + map.unit_bytes;
      if (table[u] != next) run = std::gcd(run, u);
    }
    Joined joined{{}, map.unit_bytes * run, {}};
    joined.table.reserve(map.units / run);
    for (std::size_t u = 0; u < map.units; u += run) joined.table.push_back(table[u]);
    joined.tiles = find_tiles(joined.table.data(), joined.table.size(), joined.unit_bytes,
                              map.page_tokens);
    kinds.push_back(std::move(joined));
  }
  return kinds;
}

// One head of one page, units of a size the compiler knows.
template <std::size_t Bytes>
void move_fixed(bool gather, u8* canonical, u8* engine, const std::uint32_t* table,
                std::size_t units) {
  if (gather) {
    for (std::size_t u = 0; u < units; ++u) {
      std::memcpy(canonical + u * Bytes, engine + table[u], Bytes);
    }
  } else {
    for (std::size_t u = 0; u < units; ++u) {
      std::memcpy(engine + table[u], canonical + u * Bytes, Bytes);
    }
  }
}

inline void move_sized(bool gather, bool stream, u8* canonical, u8* engine,
                       const std::uint32_t* table, std::size_t units, std::size_t bytes) {
  const copy_run::Copy copy = stream ? copy_run::streaming() : copy_run::plain;
  for (std::size_t u = 0; u < units; ++u, canonical += bytes) {
    u8* there = engine + table[u];
    copy(gather ? canonical : there, gather ? there : canonical, bytes);
  }
}

inline void move_region(bool gather, bool stream, u8* canonical, u8* engine,
                        const Joined& joined) {
  const std::uint32_t* table = joined.table.data();
  const std::size_t units = joined.table.size(), bytes = joined.unit_bytes;
  if (joined.tiles) return move_tiles(*joined.tiles, gather, canonical, engine, units * bytes);
  switch (bytes) {
    case 1: return move_fixed<1>(gather, canonical, engine, table, units);
    case 2: return move_fixed<2>(gather, canonical, engine, table, units);
    case 4: return move_fixed<4>(gather, canonical, engine, table, units);
    case 8: return move_fixed<8>(gather, canonical, engine, table, units);
    case 16: return move_fixed<16>(gather, canonical, engine, table, units);
    case 32: return move_fixed<32>(gather, canonical, engine, table, units);
    case 64: return move_fixed<64>(gather, canonical, engine, table, units);
    default: return move_sized(gather, stream, canonical, engine, table, units, bytes);
  }
}

// The same, hashing as well: in one pass where the region is one unit, else while it is in a cache.
inline void move_and_hash(bool gather, u8* canonical, u8* engine, const Joined& joined,
                          std::size_t offset, xxh3::Running& hash) {
  const std::size_t region = joined.table.size() * joined.unit_bytes;
  if (joined.table.size() == 1 && hash.position() == offset) {
    u8* const there = engine + joined.table[0];
    u8* const out = gather ? canonical : there;
    const auto loops = xxh3::can_stream(out) ? xxh3::best_loops<xxh3::Copying::kStream>()
                                             : xxh3::best_loops<xxh3::Copying::kStore>();
    hash.copy(loops, out, gather ? there : canonical, region);
  } else {
    move_region(gather, false, canonical, engine, joined);
  }
  hash.advance(offset + region);
}

// In the order of the canonical block. `hash` may be null.
inline void move_layer(const Map& map, const std::vector<Joined>& kinds, const Job& job,
                       std::size_t block, std::size_t layer, xxh3::Running* hash) {
  const std::size_t region = map.units * map.unit_bytes;
  u8* const slot = reinterpret_cast<u8*>(job.slots[block]);
  u8* const base = reinterpret_cast<u8*>(map.layers[layer]);
  const std::int64_t* pages = job.pages + block * job.columns;
  for (std::size_t k = 0; k < map.kinds; ++k) {
    for (std::size_t h = 0; h < map.heads; ++h) {
      const std::size_t row = (layer * map.kinds + k) * map.block_heads + map.first_head + h;
      for (std::size_t j = 0; j < job.columns; ++j) {
        if (pages[j] < 0) continue;
        const std::size_t offset = (row * job.columns + j) * region;
        u8* const engine =
            base + pages[j] * map.page_stride_bytes + map.head_offsets[k * map.heads + h];
        if (hash != nullptr) {
          move_and_hash(job.gather, slot + offset, engine, kinds[k], offset, *hash);
        } else {
          move_region(job.gather, true, slot + offset, engine, kinds[k]);
        }
      }
    }
  }
}

inline std::uint64_t move_block(const Map& map, const std::vector<Joined>& kinds, const Job& job,
                                std::size_t block) {
  const std::size_t bytes =
      map.layer_count * map.kinds * map.block_heads * job.columns * map.units * map.unit_bytes;
  const u8* const slot = reinterpret_cast<const u8*>(job.slots[block]);
  const bool is_long = bytes > 240;  // shorter ones are hashed in another way
  xxh3::Running hash(slot, bytes);
  for (std::size_t layer = 0; layer < map.layer_count; ++layer) {
    move_layer(map, kinds, job, block, layer, is_long ? &hash : nullptr);
  }
  return is_long ? hash.finish() : xxh3::checksum(slot, bytes);
}

// Moves all; the checksums of the canonical blocks go to `sums` unless that is null.
inline void move(const Map& map, const Job& job, std::size_t threads, std::uint64_t* sums) {
  // Whole blocks where there are enough of them: threads that share one share its pages, too.
  const bool whole = sums != nullptr || job.blocks >= 2 * threads;
  const std::size_t each = whole ? 1 : map.layer_count;
  const std::size_t items = job.blocks * each;
  if (items == 0) return;
  const std::vector<Joined> kinds = join_runs(map);
  std::atomic<std::size_t> next{0};
  auto work = [&] {
    for (std::size_t i = next++; i < items; i = next++) {
      if (sums != nullptr) {
        sums[i] = move_block(map, kinds, job, i);
      } else if (whole) {
        for (std::size_t layer = 0; layer < map.layer_count; ++layer) {
          move_layer(map, kinds, job, i, layer, nullptr);
        }
      } else {
        move_layer(map, kinds, job, i / each, i % each, nullptr);
      }
    }
    xxh3::end_streams();
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    while (helpers.size() + 1 < threads && helpers.size() + 1 < items) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // The machine has no thread left: those that run, and this one, do all the work.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace kvist::pages
