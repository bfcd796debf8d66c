// Moves regions whose small units an engine has transposed or interleaved, a tile at a time.
//
// vLLM's CPU attention keeps keys dimension by dimension, and packs pairs for matrix units; unit by
// unit that is two or four bytes a step. A region of rows (tokens) of columns (dimensions) is seen
// in tiles; where every tile has one and the same of three shapes, vector registers permute it:
//
//   kTurn2, kTurn4   units of 2 or 4 bytes, transposed: column c of a tile is a run of the engine's
//   kPairs           two rows of 2-byte units in turn: r0c0 r1c0 r0c1 r1c1 ...
//
// What fits none of them is moved unit by unit, as the table says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvist::pages {

using u8 = std::uint8_t;

enum class Shape { kTurn2, kTurn4, kPairs };

// Tiles in the order of the canonical region, row of tiles after row of tiles.
struct Tiles {
  Shape shape;
  std::size_t row_bytes;      // of the canonical region
  std::size_t stride;         // from one column of a tile to the next, in the engine
  std::size_t rows, columns;  // units in a tile
  std::vector<std::uint32_t> bases;
};

#if defined(__SSE2__)

inline __m128i load16(const u8* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store16(u8* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }

// 8 rows of 8 units of 2 bytes.
inline void turn2(u8* out, std::size_t out_stride, const u8* in, std::size_t in_stride) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load16(in + i * in_stride);
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
  for (int h = 0; h < 2; ++h) {  // rows 0 to 3, then 4 to 7
    a[4 * h] = _mm_unpacklo_epi32(b[4 * h], b[4 * h + 2]);
    a[4 * h + 1] = _mm_unpackhi_epi32(b[4 * h], b[4 * h + 2]);
    a[4 * h + 2] = _mm_unpacklo_epi32(b[4 * h + 1], b[4 * h + 3]);
    a[4 * h + 3] = _mm_unpackhi_epi32(b[4 * h + 1], b[4 * h + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    store16(out + (2 * i) * out_stride, _mm_unpacklo_epi64(a[i], a[4 + i]));
    store16(out + (2 * i + 1) * out_stride, _mm_unpackhi_epi64(a[i], a[4 + i]));
  }
}

// 4 rows of 4 units of 4 bytes.
inline void turn4(u8* out, std::size_t out_stride, const u8* in, std::size_t in_stride) {
  const __m128i a = load16(in), b = load16(in + in_stride);
  const __m128i c = load16(in + 2 * in_stride), d = load16(in + 3 * in_stride);
  const __m128i ab = _mm_unpacklo_epi32(a, b), ab2 = _mm_unpackhi_epi32(a, b);
  const __m128i cd = _mm_unpacklo_epi32(c, d), cd2 = _mm_unpackhi_epi32(c, d);
  store16(out, _mm_unpacklo_epi64(ab, cd));
  store16(out + out_stride, _mm_unpackhi_epi64(ab, cd));
  store16(out + 2 * out_stride, _mm_unpacklo_epi64(ab2, cd2));
  store16(out + 3 * out_stride, _mm_unpackhi_epi64(ab2, cd2));
}

// Two rows of 8 units of 2 bytes to 32 bytes where they stand in turn.
inline void weave(u8* out, const u8* in, std::size_t row_bytes) {
  const __m128i first = load16(in), second = load16(in + row_bytes);
  store16(out, _mm_unpacklo_epi16(first, second));
  store16(out + 16, _mm_unpackhi_epi16(first, second));
}

// The even units of 16 bytes, then the odd ones.
inline __m128i part(__m128i v) {
  v = _mm_shufflelo_epi16(v, _MM_SHUFFLE(3, 1, 2, 0));
  v = _mm_shufflehi_epi16(v, _MM_SHUFFLE(3, 1, 2, 0));
  return _mm_shuffle_epi32(v, _MM_SHUFFLE(3, 1, 2, 0));
}

inline void unweave(u8* out, std::size_t row_bytes, const u8* in) {
  const __m128i a = part(load16(in)), b = part(load16(in + 16));
  store16(out, _mm_unpacklo_epi64(a, b));
  store16(out + row_bytes, _mm_unpackhi_epi64(a, b));
}

inline void move_tile(const Tiles& tiles, bool gather, u8* canonical, u8* engine) {
  switch (tiles.shape) {
    case Shape::kTurn2:
      if (gather) return turn2(canonical, tiles.row_bytes, engine, tiles.stride);
      return turn2(engine, tiles.stride, canonical, tiles.row_bytes);
    case Shape::kTurn4:
      if (gather) return turn4(canonical, tiles.row_bytes, engine, tiles.stride);
      return turn4(engine, tiles.stride, canonical, tiles.row_bytes);
    case Shape::kPairs:
      if (gather) return unweave(canonical, tiles.row_bytes, engine);
      return weave(engine, canonical, tiles.row_bytes);
  }
}

inline void move_tiles(const Tiles& tiles, bool gather, u8* canonical, u8* engine,
                       std::size_t region_bytes) {
  const std::size_t across = 16;  // bytes of a tile's row
  const std::uint32_t* base = tiles.bases.data();
  for (std::size_t row = 0; row < region_bytes; row += tiles.rows * tiles.row_bytes) {
    for (std::size_t at = 0; at < tiles.row_bytes; at += across) {
      move_tile(tiles, gather, canonical + row + at, engine + *base++);
    }
  }
}

// The tiles of a table of `units` units of `unit` bytes, `row_units` a row, if all have `shape`.
inline std::optional<Tiles> tiles_of(Shape shape, const std::uint32_t* table, std::size_t units,
                                     std::size_t unit, std::size_t row_units) {
  const std::size_t columns = 16 / unit, rows = shape == Shape::kPairs ? 2 : columns;
  if (row_units % columns != 0 || units % (rows * row_units) != 0) return std::nullopt;
  const std::size_t stride = shape == Shape::kPairs ? 2 * unit : table[1] - table[0];
  const std::size_t step = unit;  // from a row to the next
  Tiles tiles{shape, row_units * unit, stride, rows, columns, {}};
  for (std::size_t r = 0; r < units / row_units; r += rows) {
    for (std::size_t c = 0; c < row_units; c += columns) {
      const std::uint32_t base = table[r * row_units + c];
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) {
          if (table[(r + i) * row_units + c + j] != base + i * step + j * stride) {
            return std::nullopt;
          }
        }
      }
      tiles.bases.push_back(base);
    }
  }
  return tiles;
}

inline std::optional<Tiles> find_tiles(const std::uint32_t* table, std::size_t units,
                                       std::size_t unit, std::size_t rows) {
  if (units < 2 || rows == 0 || units % rows != 0 || table[1] <= table[0]) return std::nullopt;
  const std::size_t row_units = units / rows;
  if (unit == 2) {
    auto found = tiles_of(Shape::kTurn2, table, units, unit, row_units);
    return found ? found : tiles_of(Shape::kPairs, table, units, unit, row_units);
  }
  return unit == 4 ? tiles_of(Shape::kTurn4, table, units, unit, row_units) : std::nullopt;
}

#else

inline std::optional<Tiles> find_tiles(const std::uint32_t*, std::size_t, std::size_t,
                                       std::size_t) {
  return std::nullopt;
}
inline void move_tiles(const Tiles&, bool, u8*, u8*, std::size_t) {}

#endif

}  // namespace kvist::pages
