//! What it costs to give a preempted request its K and V back, as measured: the input by which the scheduler chooses
//! between computing again and copying.

use crate::scheduler::PreemptCosts;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.25;
/// Before anything was copied, a byte is taken to need this long for both ways: a gigabyte per second and way, less than
/// any machine with a GPU does.
const UNMEASURED_NS_PER_BYTE: f64 = 2.0;
/// The executor times the host's side of a copy; the GPU's own is taken to need as long.
const SIDES: f64 = 2.0;
/// A step copies a block one way; a preemption needs both.
const WAYS: f64 = 2.0;

/// A running mean of what copying a block takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreemptMeter {
    swap_block_ns: f64,
    is_measured: bool,
}

impl PreemptMeter {
    pub fn new(bytes_per_block: u64) -> Self {
        PreemptMeter { swap_block_ns: bytes_per_block as f64 * UNMEASURED_NS_PER_BYTE, is_measured: false }
    }

    /// Learns from a step that copied so many blocks, out or in, in `swap_us` of host time.
    pub fn observe(&mut self, num_transfers: usize, swap_us: u32) {
        if num_transfers == 0 || swap_us == 0 {
            return;
        }
        let newest = f64::from(swap_us) * 1e3 / num_transfers as f64 * SIDES * WAYS;
        let weight = if std::mem::replace(&mut self.is_measured, true) { NEWEST } else { 1.0 };
        self.swap_block_ns += weight * (newest - self.swap_block_ns);
    }

    /// The costs as they are known now; `token_us` is what one token of a prompt takes. While that is not known, nothing
    /// is swapped.
    pub fn costs(&self, token_us: Option<f64>) -> PreemptCosts {
        PreemptCosts {
            recompute_token_ns: (token_us.unwrap_or(0.0) * 1e3) as u64,
            swap_block_ns: self.swap_block_ns as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_replace_the_guess_and_are_smoothed() {
        let mut meter = PreemptMeter::new(1_000);
        assert_eq!(meter.costs(None), PreemptCosts { recompute_token_ns: 0, swap_block_ns: 2_000 });
        meter.observe(0, 50);
        meter.observe(3, 0);
        assert_eq!(meter.costs(Some(1.5)), PreemptCosts { recompute_token_ns: 1_500, swap_block_ns: 2_000 });
        meter.observe(10, 100);
        assert_eq!(meter.costs(None).swap_block_ns, 40_000);
        meter.observe(10, 200);
        assert_eq!(meter.costs(None).swap_block_ns, 50_000);
    }
}
