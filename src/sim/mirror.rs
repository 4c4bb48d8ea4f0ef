//! A block map rebuilt from block events alone, as the app does it, and what can be found, as routers do it.

use crate::ids::HostSlot;
use crate::kv::{BlockEvent, BlockState, KvCache, PrefixChange};
use std::collections::{BTreeMap, BTreeSet};

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
    /// By hash.
    findable: BTreeMap<u64, PrefixChange>,
}

impl Mirror {
    pub fn new(num_blocks: u32) -> Self {
        Mirror { cells: vec![Cell::default(); num_blocks as usize], hosts: BTreeSet::new(), findable: BTreeMap::new() }
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

    /// What can be found changed. A hash is stored once until it is removed, and removed once.
    pub fn change(&mut self, change: PrefixChange) -> Result<(), String> {
        let hash = change.hash();
        let is_news = match change {
            PrefixChange::Stored { .. } => self.findable.insert(hash, change).is_none(),
            PrefixChange::Removed { .. } => self.findable.remove(&hash).is_some(),
        };
        if is_news { Ok(()) } else { Err(format!("the prefix {hash:016x} was told as stored or removed twice")) }
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
        let own = kv.findable();
        if own.len() != self.findable.len() || own.iter().any(|own| self.findable.get(&own.hash()) != Some(own)) {
            return Err(format!(
                "{} prefixes were told, and not the {} that are there",
                self.findable.len(),
                own.len()
            ));
        }
        let taken: BTreeSet<HostSlot> = kv.host_views().map(|view| view.host).collect();
        if taken != self.hosts {
            return Err(format!("events say that host slots {:?} are taken, the cache says {taken:?}", self.hosts));
        }
        Ok(())
    }
}
