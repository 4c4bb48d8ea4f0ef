//! Requests that were forked, as trees: choices, beams, branches, and what their blocks share.
//!
//! Guarantees: every request that names a parent stands under it, or at the top where the parent is forgotten; a
//! request stands in one place only; a family's saving counts each block once for every further holder in the family.
//! Beams stand there while they hold blocks: others take their places in the search from step to step.

use super::map::BlockMap;
use super::model::InspectModel;
use super::requests::RowState;
use crate::ids::{BlockId, RequestId};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// Families that ended are shown up to this many.
const MAX_ENDED: usize = 8;
/// Deeper forks stand at this depth.
const MAX_DEPTH: u32 = 12;

/// One request in its tree.
#[derive(Clone, Debug, PartialEq)]
pub struct ForkNode {
    pub id: RequestId,
    pub owner: u64,
    pub label: String,
    /// 0 for the one that all others come from.
    pub depth: u32,
    /// Which choice of its request, or beam of its search; 0 where there is one.
    pub choice: u32,
    pub is_beam: bool,
    /// The last child of its parent: its line ends here.
    pub is_last: bool,
    /// Blocks of its table: held by others too, and by it alone.
    pub shared: u32,
    pub own: u32,
    /// `None` where the step shown does not know it.
    pub state: Option<RowState>,
}

impl ForkNode {
    /// What it is to its parent.
    pub fn kind(&self) -> String {
        match (self.depth, self.choice) {
            (0, _) => self.label.clone(),
            (_, 0) => "branch".to_owned(),
            (_, choice) if self.is_beam => format!("beam {}", choice + 1),
            (_, choice) => format!("choice {}", choice + 1),
        }
    }
}

/// A tree of forked requests, depth first.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    pub nodes: Vec<ForkNode>,
    /// Different blocks that its members hold.
    pub num_blocks: u32,
    /// Blocks that would be needed beside these without sharing.
    pub num_saved: u32,
}

impl Family {
    pub fn is_alive(&self) -> bool {
        self.nodes.iter().any(|n| n.state.as_ref().is_some_and(|s| !matches!(s, RowState::Finished(_))))
    }
}

/// The families at the step shown: those alive first, then the last that ended.
pub fn families(model: &InspectModel) -> Vec<Family> {
    let Some(step) = model.step() else { return Vec::new() };
    let known: BTreeMap<RequestId, RequestId> = model
        .requests()
        .iter()
        .filter(|(_, log)| log.first_step <= step)
        .filter(|(id, log)| !log.is_passing_beam() || model.map().is_some_and(|map| table(map, *id).next().is_some()))
        .filter_map(|(id, log)| Some((id, log.parent.filter(|p| *p != id)?)))
        .collect();
    let mut children: BTreeMap<RequestId, Vec<RequestId>> = BTreeMap::new();
    for (&id, &parent) in &known {
        children.entry(parent).or_default().push(id);
    }
    let states: FxHashMap<RequestId, &RowState> = model.rows().iter().map(|r| (r.id, &r.state)).collect();
    // A ring of parents would be damage: it has no root and is not shown.
    let roots = children.keys().filter(|id| !known.contains_key(id));
    let found = roots.map(|&root| family(model, &children, &states, root));
    let (mut alive, mut ended): (Vec<_>, Vec<_>) = found.partition(Family::is_alive);
    ended.retain(|f| f.nodes.iter().any(|n| n.state.is_some()));
    ended.reverse();
    ended.truncate(MAX_ENDED);
    alive.extend(ended);
    alive
}

fn family(
    model: &InspectModel,
    children: &BTreeMap<RequestId, Vec<RequestId>>,
    states: &FxHashMap<RequestId, &RowState>,
    root: RequestId,
) -> Family {
    let mut nodes = Vec::new();
    let mut seen = FxHashSet::default();
    let mut stack = vec![(root, 0, true)];
    while let Some((id, depth, is_last)) = stack.pop() {
        if !seen.insert(id) {
            continue;
        }
        nodes.push(node(model, states, id, depth, is_last));
        let below = children.get(&id).map_or(&[][..], Vec::as_slice);
        let last = below.len().saturating_sub(1);
        stack.extend(below.iter().enumerate().rev().map(|(i, &child)| (child, (depth + 1).min(MAX_DEPTH), i == last)));
    }
    let mut family = Family { nodes, num_blocks: 0, num_saved: 0 };
    if let Some(map) = model.map() {
        let mut blocks: FxHashSet<BlockId> = FxHashSet::default();
        let mut references = 0;
        for node in &family.nodes {
            for &block in table(map, node.id) {
                references += 1;
                blocks.insert(block);
            }
        }
        family.num_blocks = blocks.len() as u32;
        family.num_saved = references - family.num_blocks;
    }
    family
}

fn node(
    model: &InspectModel,
    states: &FxHashMap<RequestId, &RowState>,
    id: RequestId,
    depth: u32,
    is_last: bool,
) -> ForkNode {
    let log = model.requests().get(id);
    let (mut shared, mut own) = (0, 0);
    if let Some(map) = model.map() {
        for &block in table(map, id) {
            let is_shared = map.cell(block).is_some_and(|c| c.refs >= 2);
            *(if is_shared { &mut shared } else { &mut own }) += 1;
        }
    }
    ForkNode {
        id,
        owner: model.requests().owner_of(id),
        label: model.owner_of(id).label,
        depth,
        choice: log.map_or(0, |l| l.choice),
        is_beam: log.is_some_and(|l| l.is_beam),
        is_last,
        shared,
        own,
        state: states.get(&id).map(|s| (*s).clone()),
    }
}

/// The blocks of a table without its holes.
fn table(map: &BlockMap, id: RequestId) -> impl Iterator<Item = &BlockId> {
    map.tables().get(&id).into_iter().flatten().filter(|b| **b != BlockId::NULL)
}
