// What the value policy learns, by class and age; `kvist/policy/hazard.py` is the specification.
//
// The arithmetic of a refresh stays there, in numpy: `Revise` is called with what it needs.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "value_nodes.hpp"
#include "value_ranking.hpp"

namespace kvist::value {

// The counts of the classes that were ever used.
struct Counts {
  std::vector<u32> known;
  std::size_t ages;
  std::vector<double> ended;    // (known, ages)
  std::vector<double> waiting;  // (ages, known)
};

// Gives the values of shape (known, ages).
using Revise = std::function<std::vector<double>(const Counts&)>;

class HazardTable {
 public:
  HazardTable(std::size_t classes, double now_s)
      : classes_(classes), ended_(classes * kAges, 0.0), values_(classes * kAges, 0.0),
        cohort_(std::make_shared<Cohort>(now_s, classes)), cohorts_{cohort_},
        known_(classes, false), began_s_(now_s) {}

  Values values() const { return values_.data(); }
  const std::shared_ptr<Cohort>& cohort() const { return cohort_; }

  static Cohort& merged(Cohort& cohort) {
    Cohort* last = &cohort;
    while (last->into != nullptr) last = last->into.get();
    return *last;
  }

  void ended_wait(Cohort& cohort, u32 cls, int bucket, i64 blocks) {
    ended_[cls * kAges + static_cast<std::size_t>(bucket)] += static_cast<double>(blocks);
    merged(cohort).waiting[cls] -= static_cast<double>(blocks);
  }

  void fade(double factor) {
    for (std::size_t cls = 0; cls < classes_; ++cls) {
      if (!known_[cls]) continue;
      for (std::size_t age = 0; age < kAges; ++age) ended_[cls * kAges + age] *= factor;
    }
  }

  void refresh(double now_s, const Ages& ages, const Revise& revise) {
    Counts counts;
    for (std::size_t cls = 0; cls < classes_; ++cls) {
      if (cohort_->waiting[cls] != 0) known_[cls] = true;
      if (known_[cls]) counts.known.push_back(static_cast<u32>(cls));
    }
    std::vector<int> buckets;  // of the cohorts
    for (const auto& cohort : cohorts_) buckets.push_back(ages.bucket(now_s - cohort->began_s));
    if (!counts.known.empty()) {
      counts.ages = 1 + static_cast<std::size_t>(ages.bucket(now_s - began_s_));
      for (const u32 cls : counts.known) {
        const double* row = &ended_[cls * kAges];
        counts.ended.insert(counts.ended.end(), row, row + counts.ages);
      }
      counts.waiting.resize(counts.ages * counts.known.size());
      for (std::size_t i = 0; i < cohorts_.size(); ++i) {
        const std::size_t age = std::min(static_cast<std::size_t>(buckets[i]), counts.ages - 1);
        double* to = &counts.waiting[age * counts.known.size()];
        for (const u32 cls : counts.known) *to++ += cohorts_[i]->waiting[cls];
      }
      const std::vector<double> fresh = revise(counts);
      const double* from = fresh.data();
      for (const u32 cls : counts.known) {
        std::copy(from, from + counts.ages, &values_[cls * kAges]);
        from += counts.ages;
      }
    }
    if (cohorts_.size() >= kMostCohorts) merge(buckets);
    cohort_ = std::make_shared<Cohort>(now_s, classes_);
    cohorts_.push_back(cohort_);
  }

 private:
  static constexpr std::size_t kMostCohorts = 96;

  // Merges cohorts whose ages share a bucket, the oldest first, until half are left.
  void merge(const std::vector<int>& buckets) {
    std::vector<std::shared_ptr<Cohort>> kept;
    std::size_t spare = cohorts_.size() - kMostCohorts / 2;
    int last = -1;
    for (std::size_t i = 0; i < cohorts_.size(); ++i) {
      Cohort& cohort = *cohorts_[i];
      if (buckets[i] != last || spare == 0) {
        kept.push_back(cohorts_[i]);
        last = buckets[i];
        continue;
      }
      --spare;
      cohort.into = kept.back();
      Cohort& into = *kept.back();
      double ours = 0, theirs = 0;
      for (std::size_t cls = 0; cls < classes_; ++cls) {
        ours += into.waiting[cls];
        theirs += cohort.waiting[cls];
        into.waiting[cls] += cohort.waiting[cls];
      }
      const double share = ours + theirs != 0 ? theirs / (ours + theirs) : 0.5;
      into.began_s += share * (cohort.began_s - into.began_s);
      cohort.waiting = {};
    }
    cohorts_ = std::move(kept);
  }

  std::size_t classes_;
  std::vector<double> ended_;   // next uses, by class and age
  std::vector<double> values_;  // uses per block-second, by class and age
  std::shared_ptr<Cohort> cohort_;                // of uses that happen now
  std::vector<std::shared_ptr<Cohort>> cohorts_;  // those that were not merged, oldest first
  std::vector<bool> known_;
  double began_s_;
};

}  // namespace kvist::value
