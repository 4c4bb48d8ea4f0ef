//! A block map rebuilt from block events alone, as the app does it.

use crate::ids::HostSlot;
use crate::kv::{BlockEvent, BlockState, KvCache};
use std::collections::BTreeSet;

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Cell {
    refs: u32,
    filled: u32,
    is_idle: bool,
    is_pinned: bool,
}

pub(super) struct Mirror {
    cells: Vec<Cell>,
    /// Taken places of host memory.
    hosts: BTreeSet<HostSlot>,
}

impl Mirror {
    pub fn new(num_blocks: u32) -> Self {
        Mirror { cells: vec![Cell::default(); num_blocks as usize], hosts: BTreeSet::new() }
    }

    pub fn apply(&mut self, event: BlockEvent) {
        match event {
            BlockEvent::Alloc { block, .. } => self.cells[block.idx()] = Cell { refs: 1, ..Cell::default() },
            BlockEvent::Fill { block, filled } => self.cells[block.idx()].filled = filled,
            BlockEvent::Share { block, .. } => {
                self.cells[block.idx()].refs += 1;
                self.cells[block.idx()].is_idle = false;
            }
            BlockEvent::Unref { block, .. } => self.cells[block.idx()].refs -= 1,
            BlockEvent::CacheIdle { block } => self.cells[block.idx()].is_idle = true,
            BlockEvent::Evict { block } | BlockEvent::Free { block } => self.cells[block.idx()] = Cell::default(),
            BlockEvent::SwapOut { host, .. } => drop(self.hosts.insert(host)),
            BlockEvent::HostFree { host } => drop(self.hosts.remove(&host)),
            BlockEvent::Pin { block } => self.cells[block.idx()].is_pinned = true,
            BlockEvent::Unpin { block } => self.cells[block.idx()].is_pinned = false,
            BlockEvent::Publish { .. } | BlockEvent::SwapIn { .. } | BlockEvent::Copy { .. } => {}
        }
    }

    /// Content came to this place from outside.
    pub fn adopt(&mut self, host: HostSlot) {
        self.hosts.insert(host);
    }

    /// The rebuilt map equals the cache's own.
    pub fn check(&self, kv: &KvCache) -> Result<(), String> {
        for (id, (cell, block)) in self.cells.iter().zip(kv.blocks()).enumerate() {
            let is_idle = block.state == BlockState::CachedIdle;
            let own = Cell { refs: block.refs, filled: block.filled, is_idle, is_pinned: block.is_pinned };
            if *cell != own {
                return Err(format!("events say {cell:?} of block {id}, the cache says {own:?}"));
            }
        }
        let taken: BTreeSet<HostSlot> = kv.host_views().map(|view| view.host).collect();
        if taken != self.hosts {
            return Err(format!("events say that host slots {:?} are taken, the cache says {taken:?}", self.hosts));
        }
        Ok(())
    }
}
