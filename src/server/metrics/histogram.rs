//! A histogram of atomics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Parts of a unit that the sum is kept in.
const SUM_SCALE: f64 = 1e6;

/// Counts by upper bound. A reader may see an observation in its bucket and not yet in the sum.
pub struct Histogram {
    bounds: &'static [f64],
    /// Of each bound, and of everything above.
    counts: Vec<AtomicU64>, // [bounds + 1]
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    /// `bounds` ascend.
    pub fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, value: f64) {
        self.observe_times(value, 1);
    }

    /// The same value so many times.
    pub fn observe_times(&self, value: f64, times: u64) {
        let at = self.bounds.partition_point(|&bound| bound < value);
        self.counts[at].fetch_add(times, Ordering::Relaxed);
        self.sum.fetch_add((value.max(0.0) * SUM_SCALE * times as f64).round() as u64, Ordering::Relaxed);
    }

    /// Microseconds as seconds.
    pub fn observe_us(&self, us: u64) {
        self.observe(us as f64 / 1e6);
    }

    /// Bounds of at most `limit` with the observations up to each.
    pub fn cumulative(&self, limit: f64) -> impl Iterator<Item = (f64, u64)> + '_ {
        let mut total = 0;
        self.bounds.iter().zip(&self.counts).take_while(move |(bound, _)| **bound <= limit).map(
            move |(bound, count)| {
                total += count.load(Ordering::Relaxed);
                (*bound, total)
            },
        )
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    pub fn sum(&self) -> f64 {
        self.sum.load(Ordering::Relaxed) as f64 / SUM_SCALE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_up_to_and_including_their_bound() {
        let histogram = Histogram::new(&[1.0, 2.0, 5.0]);
        [0.5, 1.0, 1.5, 5.0, 9.0].into_iter().for_each(|value| histogram.observe(value));
        histogram.observe_times(2.0, 3);
        assert_eq!(histogram.cumulative(f64::INFINITY).collect::<Vec<_>>(), [(1.0, 2), (2.0, 6), (5.0, 7)]);
        assert_eq!(histogram.cumulative(2.0).count(), 2);
        assert_eq!((histogram.count(), histogram.sum()), (8, 23.0));
    }
}
