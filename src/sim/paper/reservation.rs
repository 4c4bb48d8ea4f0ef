//! The controls: a request's K and V in one contiguous piece, reserved when it joins and given back when it ends.
//!
//! As in the paper's Orca baselines: first come first served, one token a step, memory from a buddy allocator. They differ
//! in what they know of the output's length.

use super::buddy::{Buddy, Region};
use super::lengths::{Lengths, MAX_LEN};
use serde::Serialize;

/// How much is reserved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// The longest context there can be.
    Max,
    /// The output's length rounded up to a power of two.
    Pow2,
    /// The output's length, known in advance.
    Oracle,
}

impl Reservation {
    pub fn slots(self, lengths: Lengths) -> u32 {
        match self {
            Reservation::Max => MAX_LEN,
            Reservation::Pow2 => (lengths.prompt + lengths.output.next_power_of_two()).min(MAX_LEN),
            Reservation::Oracle => lengths.total(),
        }
    }
}

/// How a memory is used, as shares of all its slots, over the steps in which requests wait for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MemoryUse {
    /// Hold the K and V of a token.
    pub useful: f64,
    /// Reserved for tokens to come.
    pub reserved: f64,
    /// Reserved for tokens that never come.
    pub internal: f64,
    /// Lost to rounding and in gaps.
    pub external: f64,
    /// `useful` as a share of the slots that requests hold, rounding included.
    pub of_held: f64,
    /// Requests in the batch.
    pub mean_running: f64,
}

struct Running {
    lengths: Lengths,
    region: Region,
    reserved: u32,
    computed: u32,
}

/// Serves the requests in order; the memory is full from the first request that does not fit to the last.
pub fn serve(reservation: Reservation, num_slots: u32, requests: &[Lengths]) -> MemoryUse {
    let mut buddy = Buddy::new(num_slots);
    let mut waiting = requests.iter().copied().peekable();
    let mut running: Vec<Running> = Vec::new();
    let (mut sum, mut held, mut steps) = (MemoryUse::default(), 0.0, 0.0);
    loop {
        while let Some(&lengths) = waiting.peek() {
            let reserved = reservation.slots(lengths);
            let Some(region) = buddy.allocate(reserved) else { break };
            running.push(Running { lengths, region, reserved, computed: lengths.prompt - 1 });
            waiting.next();
        }
        if waiting.peek().is_none() {
            break;
        }
        assert!(!running.is_empty(), "a request is larger than the memory");
        for request in &mut running {
            request.computed += 1;
            let to_come = request.lengths.total() - request.computed;
            sum.useful += f64::from(request.computed);
            sum.reserved += f64::from(to_come);
            sum.internal += f64::from(request.reserved - request.lengths.total());
        }
        held += f64::from(num_slots - buddy.num_free());
        sum.mean_running += running.len() as f64;
        steps += 1.0;
        // The last token of an output is never computed: it has no K and V.
        let is_done = |r: &mut Running| r.computed + 1 >= r.lengths.total();
        running.extract_if(.., is_done).for_each(|r| buddy.free(r.region));
    }
    let slot_steps = f64::from(num_slots) * f64::max(steps, 1.0);
    let [useful, reserved, internal] = [sum.useful, sum.reserved, sum.internal].map(|slots| slots / slot_steps);
    let external = if steps > 0.0 { 1.0 - useful - reserved - internal } else { 0.0 };
    let of_held = sum.useful / f64::max(held, 1.0);
    MemoryUse { useful, reserved, internal, external, of_held, mean_running: sum.mean_running / f64::max(steps, 1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_memory_for_one_request_at_a_time() {
        let requests = [Lengths { prompt: 2, output: 3 }; 2];
        let used = serve(Reservation::Oracle, 8, &requests);
        // 5 of 8 slots; 2, 3 and 4 tokens are there after the three steps of the first request.
        assert!((used.useful - 3.0 / 8.0).abs() < 1e-9 && (used.reserved - 2.0 / 8.0).abs() < 1e-9, "{used:?}");
        assert!((used.external - 3.0 / 8.0).abs() < 1e-9 && used.internal == 0.0 && used.mean_running == 1.0);
        assert!((used.of_held - 3.0 / 8.0).abs() < 1e-9, "5 slots come as 8");
    }

    #[test]
    fn reservations_follow_what_is_known_of_the_output() {
        let lengths = Lengths { prompt: 100, output: 25 };
        let slots = [Reservation::Max, Reservation::Pow2, Reservation::Oracle].map(|r| r.slots(lengths));
        assert_eq!(slots, [2048, 132, 125]);
    }
}
