//! Pins that come and go, prefixes that are evicted, caches that are reset, beside the requests of a world.

use super::WorldStats;
use super::rng::Rng;
use super::world::World;
use crate::ids::RequestId;
use crate::kv::CacheKey;
use crate::protocol::{FinishReason, RunError};
use crate::scheduler::{NewSequence, Scheduler};

/// What has become of the world's pins.
#[derive(Default)]
pub(super) struct Prefixes {
    num_added: usize,
    /// Pins on their way.
    pending: Vec<RequestId>,
    /// Pins that hold their blocks, as far as nobody let them go.
    held: Vec<RequestId>,
}

impl Prefixes {
    pub fn are_left(&self, world: &World) -> bool {
        self.num_added < world.pins.len()
    }

    /// Blocks that a new request may come to use: the pool, less what pins keep from it.
    pub fn room_for(&self, new: &NewSequence, world: &World, scheduler: &Scheduler) -> u32 {
        if self.num_added == 0 {
            return world.kv.num_blocks - 1;
        }
        scheduler.room_for(&new.prompt, CacheKey { salt: new.cache_salt, adapter: new.adapter })
    }

    /// Between two steps: pins arrive, and at random something happens to a prefix.
    pub fn step(&mut self, step: u64, world: &World, scheduler: &mut Scheduler, rng: &mut Rng, stats: &mut WorldStats) {
        while let Some(pin) = world.pins.get(self.num_added).filter(|pin| pin.arrives_at <= step) {
            self.num_added += 1;
            match scheduler.add_pin(pin.new.clone()) {
                Ok(()) => self.pending.push(pin.new.id),
                Err(_) => stats.refused_pins += 1,
            }
        }
        // Worlds without pins draw nothing here.
        if world.prefix_percent == 0 || !rng.percent(world.prefix_percent) {
            return;
        }
        let prefixes = scheduler.kv().prefixes(16, &|_| false);
        let prefix = prefixes.get(rng.range(0, 15) as usize);
        let prefix = prefix.or(prefixes.first());
        match (rng.range(0, 9), prefix) {
            (0, _) => {
                scheduler.reset_prefixes();
                stats.resets += 1;
            }
            (1..=4, Some(prefix)) => stats.unpinned += u64::from(scheduler.unpin(prefix.id)),
            (_, Some(prefix)) => stats.evicted_prefixes += u64::from(scheduler.evict_prefix(prefix.id) > 0),
            (_, None) => {}
        }
    }

    /// The end of a pin's request. Its blocks may be refused to it when their content is suspect or their hash is another
    /// pin's, and a pin that is computed again may have become too large beside those who came since.
    pub fn ended(
        &mut self,
        request: RequestId,
        outcome: &Result<FinishReason, RunError>,
        stats: &mut WorldStats,
    ) -> Result<(), String> {
        let was_held = self.held.contains(&request);
        if !was_held && !self.pending.contains(&request) {
            return Err(format!("pin {request} ended, but was not asked for"));
        }
        self.pending.retain(|id| *id != request);
        match outcome {
            Ok(FinishReason::MaxTokens) => {
                stats.pinned += 1;
                stats.repinned += u64::from(was_held);
                if !was_held {
                    self.held.push(request);
                }
                Ok(())
            }
            Err(RunError::PrefixLost | RunError::NotFinite { .. } | RunError::PinLimit { .. }) => Ok(()),
            Err(RunError::QueueFull { .. } | RunError::NeverFits { .. } | RunError::ContextExceeded { .. }) => Ok(()),
            other => Err(format!("pin {request} ended with {other:?}")),
        }
    }

    /// All requests ended: the pins alone hold blocks, and once they let go nobody does.
    pub fn check_end(&self, scheduler: &mut Scheduler, stats: &mut WorldStats) -> Result<(), String> {
        let prefixes = scheduler.kv().prefixes(usize::MAX, &|_| false);
        stats.pinned_hits += prefixes.iter().filter(|prefix| prefix.is_pinned).map(|prefix| prefix.hits).sum::<u64>();
        let counts = scheduler.kv().counts();
        if counts.free + counts.cached_idle + counts.pinned != counts.total {
            return Err(format!("invariant 18: all requests ended, but more than pins hold blocks: {counts:?}"));
        }
        while let Some(prefix) = scheduler.kv().prefixes(1, &|_| false).first().filter(|prefix| prefix.is_pinned) {
            if !scheduler.unpin(prefix.id) {
                return Err(format!("prefix {} is pinned, but cannot be let go", prefix.id));
            }
        }
        scheduler.check_integrity()
    }
}
