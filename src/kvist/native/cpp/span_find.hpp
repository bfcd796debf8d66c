// One lookup in the index of cached text; `kvist/native/span_find_twin.py` and `SpanTable.find` of
// `span_twin.py` are its specification.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "span_table.hpp"

namespace kvist::spans {

constexpr std::size_t kMostChildren = 32;  // tried where a run goes on behind a block
constexpr std::size_t kAhead = 16;         // fingerprints whose cache misses overlap

struct Run {
  i64 start, stop, source;
  std::size_t path, blocks;  // where its blocks begin in `Finder::paths`, and how many they are
};

// (block, place of the block in the prompt) -> up to where that diagonal is done.
class Covered {
 public:
  i64& operator()(u32 block, i64 place) {
    if (++asked_ * 2 > entries_.size()) grow();
    const u64 key = static_cast<u64>(block) << 32 | static_cast<u32>(place + (i64{1} << 31));
    Entry& entry = at(key);
    if (entry.key == kFree) {
      entry = {key, -1};
    } else {
      --asked_;
    }
    return entry.stop;
  }

 private:
  static constexpr u64 kFree = ~u64{0};
  struct Entry {
    u64 key;
    i64 stop;
  };

  Entry& at(u64 key) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t slot = (key * 0x9E3779B97F4A7C15u >> 20) & mask;
    while (entries_[slot].key != kFree && entries_[slot].key != key) slot = (slot + 1) & mask;
    return entries_[slot];
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2, Entry{kFree, -1});
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.key != kFree) at(entry.key) = entry;
    }
  }

  std::vector<Entry> entries_ = std::vector<Entry>(1024, Entry{kFree, -1});
  std::size_t asked_ = 0;
};

class Finder {
 public:
  Finder(const SpanTable& table, const u32* prompt, std::size_t tokens)
      : table_(table), prompt_(prompt), tokens_(static_cast<i64>(tokens)),
        size_(static_cast<i64>(table.block_tokens())) {}

  std::vector<Run> runs;
  std::vector<u32> paths;
  bool curtailed = false;

  void look_up(const i64* ends, const u64* fingerprints, std::size_t marks, const u8* scope,
               i64 least_tokens, i64 budget_tokens) {
    i64 compared = 0;
    for (std::size_t i = 0; i < marks; ++i) {
      if (i % kAhead == 0) announce(fingerprints, i + kAhead, std::min(marks, i + 2 * kAhead));
      const i64 end = ends[i];
      for (u32 id = table_.newest(fingerprints[i]); id != kNone; id = table_.mark(id).older) {
        const Mark& mark = table_.mark(id);
        if (std::memcmp(table_.block(mark.block).scope, scope, kScopeBytes) != 0) continue;
        if (covered_(mark.block, end - mark.offset) > end) continue;
        if (compared >= budget_tokens) {
          curtailed = true;
          return;
        }
        const Run run = run_around(end, mark.block, mark.offset);
        compared += run.stop - run.start + static_cast<i64>(run.blocks) * size_ + 1;
        for (std::size_t n = 0; n < run.blocks; ++n) {
          const i64 place = run.start - run.source % size_ + static_cast<i64>(n) * size_;
          covered_(paths[run.path + n], place) = run.stop;
        }
        if (run.stop - run.start >= least_tokens && run.blocks != 0) {
          runs.push_back(run);
        } else {
          paths.resize(run.path);
        }
      }
    }
  }

  // Leaves out the runs that enough longer ones cover, and puts the others in order.
  void choose(u32 alternatives) {
    std::vector<u32> order(runs.size()), cover(static_cast<std::size_t>(tokens_));
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(), [&](u32 a, u32 b) {
      const i64 one = runs[a].stop - runs[a].start, two = runs[b].stop - runs[b].start;
      return one != two ? one > two : a < b;
    });
    std::vector<u32> kept;
    for (const u32 id : order) {
      const auto from = cover.begin() + runs[id].start, to = cover.begin() + runs[id].stop;
      if (*std::min_element(from, to) >= alternatives) continue;
      for (auto at = from; at != to; ++at) ++*at;
      kept.push_back(id);
    }
    std::sort(kept.begin(), kept.end(), [&](u32 a, u32 b) {
      if (runs[a].start != runs[b].start) return runs[a].start < runs[b].start;
      return runs[a].stop != runs[b].stop ? runs[a].stop > runs[b].stop : a < b;
    });
    std::vector<Run> chosen;
    for (const u32 id : kept) chosen.push_back(runs[id]);
    runs.swap(chosen);
  }

 private:
  void announce(const u64* fingerprints, std::size_t from, std::size_t to) const {
    for (std::size_t i = from; i < to; ++i) table_.announce(fingerprints[i]);
  }

  i64 agrees_back(i64 at, u32 block, i64 offset) const {
    const u32* text = table_.text(block);
    i64 count = 0;
    while (count <= at && count <= offset && prompt_[at - count] == text[offset - count]) ++count;
    return count;
  }

  i64 agrees_on(i64 at, u32 block, i64 offset) const {
    const u32* text = table_.text(block) + offset;
    const i64 most = std::min(tokens_ - at, size_ - offset);
    i64 count = 0;
    while (count < most && prompt_[at + count] == text[count]) ++count;
    return count;
  }

  // The whole run around a token; its blocks are appended to `paths`.
  Run run_around(i64 end, u32 block, i64 offset) {
    const std::size_t path = paths.size();
    i64 back = agrees_back(end, block, offset);
    if (back == 0) {
      return {end, end, static_cast<i64>(table_.block(block).number) * size_ + offset, path, 0};
    }
    paths.push_back(block);
    i64 at = end - back, left = offset - back;
    u32 first = block;
    while (left < 0 && at >= 0 && table_.block(first).parent != kNone) {
      back = agrees_back(at, table_.block(first).parent, size_ - 1);
      if (back == 0) break;
      first = table_.block(first).parent;
      paths.push_back(first);
      at -= back;
      left = size_ - 1 - back;
    }
    std::reverse(paths.begin() + static_cast<std::ptrdiff_t>(path), paths.end());
    const i64 source = static_cast<i64>(table_.block(first).number) * size_ + left + 1;
    i64 stop = end + 1, right = offset + 1;
    u32 last = block;
    for (;;) {
      const i64 count = agrees_on(stop, last, right);
      stop += count;
      right += count;
      if (right < size_ || stop == tokens_) break;
      last = continuation(stop, last);
      if (last == kNone) break;
      right = 0;
      paths.push_back(last);
    }
    return {at + 1, stop, source, path, paths.size() - path};
  }

  // The child that agrees longest with the prompt; none if none agrees at all.
  u32 continuation(i64 at, u32 block) const {
    u32 best = kNone;
    i64 longest = 0;
    std::size_t tried = 0;
    for (u32 child = table_.block(block).child; child != kNone && tried < kMostChildren; ++tried) {
      const i64 count = agrees_on(at, child, 0);
      if (count > longest) {
        best = child;
        longest = count;
      }
      child = table_.block(child).next;
    }
    return best;
  }

  const SpanTable& table_;
  const u32* prompt_;
  const i64 tokens_, size_;
  Covered covered_;
};

}  // namespace kvist::spans
