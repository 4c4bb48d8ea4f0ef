//! Host memory at one step: whose blocks wait there.
//!
//! Guarantees: a place holds one block at a time; places that deltas give back twice, or never named before, change
//! nothing. It does not attempt to know places that are free.

use crate::ids::RequestId;
use crate::telemetry::HostBlock;
use std::collections::BTreeMap;

/// A block in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCell {
    /// The preempted request that waits for it; `None` for a block of the prefix cache.
    pub request: Option<RequestId>,
    /// Whose colour it has: the request above, or the last one that held the block on the GPU; `None` where no record
    /// told.
    pub owner: Option<RequestId>,
    pub hash: Option<u64>,
    /// Tokens written, and the place in the holder's table; 0 where no record told.
    pub filled: u32,
    pub logical: u32,
    /// Step in which it came here.
    pub since_step: u32,
}

/// The taken places, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMap {
    cells: BTreeMap<u32, HostCell>,
}

impl HostMap {
    /// As the engine described it at `step`.
    pub fn from_snapshot(blocks: &[HostBlock], step: u32) -> HostMap {
        let cell = |b: &HostBlock| HostCell {
            request: b.request,
            owner: b.request,
            hash: b.hash,
            since_step: step,
            ..HostCell::default()
        };
        HostMap { cells: blocks.iter().map(|b| (b.host, cell(b))).collect() }
    }

    pub fn put(&mut self, host: u32, cell: HostCell) {
        self.cells.insert(host, cell);
    }

    pub fn free(&mut self, host: u32) {
        self.cells.remove(&host);
    }

    pub fn get(&self, host: u32) -> Option<&HostCell> {
        self.cells.get(&host)
    }

    /// Taken places, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u32, &HostCell)> {
        self.cells.iter().map(|(host, cell)| (*host, cell))
    }

    pub fn len(&self) -> usize {
        self.cells.len()
    }

    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Places that preempted requests wait for.
    pub fn num_swapped(&self) -> u32 {
        self.cells.values().filter(|c| c.request.is_some()).count() as u32
    }

    /// Places that the prefix cache uses.
    pub fn num_cached(&self) -> u32 {
        self.len() as u32 - self.num_swapped()
    }

    /// Places that wait for `request`.
    pub fn num_of(&self, request: RequestId) -> u32 {
        self.cells.values().filter(|c| c.request == Some(request)).count() as u32
    }

    /// The first place beyond all taken ones: the least that host memory must have.
    pub fn end(&self) -> u32 {
        self.cells.last_key_value().map_or(0, |(host, _)| host + 1)
    }
}
