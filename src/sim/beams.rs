//! Beam searches in a world: the searches that an engine would run beside the scheduler, and what each of them finds
//! when it is alone.

use super::oracle;
use super::runner::{Client, Run};
use super::world::World;
use crate::batch::RowSampling;
use crate::executor::StepOutput;
use crate::executor::paged_fake::UnpagedRun;
use crate::ids::{RequestId, TokenId};
use crate::kv::KvGroups;
use crate::protocol::{BeamParams, FinishReason, RunError};
use crate::sampling::beam::{BeamSearch, Hypothesis};
use crate::scheduler::{GangAdvance, GangChild, GangNext, GangRows, NewSequence, PreemptMode, StepPlan, WaitReason};

/// A client's search.
pub(super) struct Search {
    pub live: BeamSearch,
    /// What it finds alone.
    expected: Vec<Hypothesis>,
}

/// Blocks of all beams at full length, which share the full blocks of the prompt; with windows they may share nothing.
fn bound(world: &World, prompt: u32, total: u32, width: u32) -> u32 {
    if world.kv.groups != KvGroups::ONE {
        return width * oracle::blocks(world, total);
    }
    let shared = prompt / world.kv.block_size;
    shared + width * (total.div_ceil(world.kv.block_size) - shared)
}

/// True when the search must be refused, whatever the load.
fn is_impossible(world: &World, new: &NewSequence, width: u32, room: u32) -> bool {
    let prompt = new.prompt.len() as u32;
    let total = prompt + new.stop.max_tokens.unwrap_or(1);
    oracle::is_impossible(world, new, room)
        || width > world.scheduler.max_num_seqs
        || bound(world, prompt, total, width) > room
}

/// A search at its start, with the room that it has in this world.
fn start(world: &World, new: &NewSequence, params: &BeamParams, room: u32) -> BeamSearch {
    let prompt = new.prompt.len() as u32;
    let (max_new_tokens, at_limit) = match new.stop.max_tokens {
        Some(max) => (max, FinishReason::MaxTokens),
        None => {
            let fits = |total: &u32| bound(world, prompt, *total, params.width) <= room;
            let longest = (prompt + 1..=world.scheduler.max_model_len).take_while(fits).last();
            (longest.unwrap_or(prompt + 1) - prompt, FinishReason::ContextFull)
        }
    };
    BeamSearch::new(params.clone(), max_new_tokens, at_limit)
}

fn ends(new: &NewSequence, num_tokens: u32, token: TokenId) -> Option<FinishReason> {
    let is_stop = new.stop.stop_token_ids.contains(&token) || !new.stop.ignore_eos && new.eos_ids.contains(&token);
    (is_stop && num_tokens >= new.stop.min_tokens).then_some(FinishReason::StopToken(token))
}

/// The whole search without scheduler, cache or pages.
fn search_alone(world: &World, new: &NewSequence, params: &BeamParams, room: u32) -> Vec<Hypothesis> {
    let sampling = RowSampling { is_beam: true, ..RowSampling::new(&new.sampling, new.seed) };
    let mut search = start(world, new, params, room);
    let mut prompt = UnpagedRun::with_windows(&world.kv.groups.windows().collect::<Vec<_>>()).with_adapter(new.adapter);
    new.prompt.iter().for_each(|token| prompt.push(*token));
    let mut runs = vec![prompt];
    loop {
        let list = |(beam, run): (usize, &UnpagedRun)| {
            let has_penalties = new.sampling.has_penalties();
            let penalties =
                if has_penalties { oracle::penalties(&new.prompt, search.live_tokens(beam)) } else { Vec::new() };
            run.continuations(sampling, &penalties, &new.sampling.logit_bias, world.vocab_size)
        };
        let lists: Vec<Vec<(TokenId, f32)>> = runs.iter().enumerate().map(list).collect();
        let num_tokens = search.num_tokens();
        let Some(children) = search.advance(&lists, |_, token| ends(new, num_tokens, token)) else {
            return search.outputs().to_vec();
        };
        let go_on = |child: &crate::sampling::beam::BeamChild| {
            let mut run = runs[child.parent].clone();
            run.push(child.token);
            run
        };
        runs = children.iter().map(go_on).collect();
    }
}

impl Run {
    /// A new client with a search. Its further beams take the ids after its own.
    pub(super) fn submit_search(&mut self, mut new: NewSequence, params: BeamParams) -> Result<(), String> {
        new.id = RequestId(self.clients.len() as u64 + 1);
        new.sampling.logprobs =
            Some(BeamSearch::num_candidates(params.width, 2 + new.stop.stop_token_ids.len() as u32) as u8);
        let room = self.capacity_for(&new);
        let is_impossible = is_impossible(&self.world, &new, params.width, room);
        let mut client = Client::new(&self.world, new.clone(), room, None);
        client.search = (!is_impossible).then(|| Search {
            live: start(&self.world, &new, &params, room),
            expected: search_alone(&self.world, &new, &params, room),
        });
        self.stats.searches += 1;
        match self.scheduler.add_gang(new.clone(), params.width) {
            Ok(()) if is_impossible => return Err("a search that can never fit was taken".into()),
            Err(error) if !is_impossible && !matches!(error, RunError::QueueFull { .. }) => {
                return Err(format!("a search that fits was refused: {error}"));
            }
            Ok(()) => {}
            Err(error) => {
                self.stats.refused += 1;
                client.end = Some(Err(error));
            }
        }
        self.clients.push(client);
        for _ in 1..params.width {
            let mut beam = Client::new(&self.world, new.clone(), room, None);
            beam.end = Some(Err(RunError::ShutDown));
            self.clients.push(beam);
        }
        Ok(())
    }

    /// The client whose request, or whose search's beam, has this id.
    pub(super) fn party(&self, id: RequestId) -> RequestId {
        self.scheduler.get(id).and_then(|seq| seq.gang()).unwrap_or(id)
    }

    /// Lets the searches see what came back, as the engine does.
    pub(super) fn advance_searches(
        &mut self,
        plan: &StepPlan,
        output: &StepOutput,
    ) -> Result<Vec<GangAdvance>, String> {
        let mut advances = Vec::new();
        for GangRows { gang, logits } in self.scheduler.gang_rows(plan) {
            if logits.iter().any(|&l| output.not_finite[l]) {
                continue;
            }
            self.stats.beam_steps += u64::from(logits.len() > 1);
            let client = &mut self.clients[gang.idx() - 1];
            let search = client.search.as_mut().ok_or("a gang without a search")?;
            let row = |&l: &usize| output.logprobs[l].as_ref().map(|row| row.top.clone()).unwrap_or_default();
            let lists: Vec<Vec<(TokenId, f32)>> = logits.iter().map(row).collect();
            let (new, num_tokens) = (&client.new, search.live.num_tokens());
            let next = match search.live.advance(&lists, |_, token| ends(new, num_tokens, token)) {
                None => {
                    GangNext::End(search.live.outputs().first().map_or(FinishReason::Aborted, |h| h.reason.clone()))
                }
                Some(children) => {
                    GangNext::Beams(children.iter().map(|c| GangChild { parent: c.parent, token: c.token }).collect())
                }
            };
            advances.push(GangAdvance { gang, next });
        }
        Ok(advances)
    }

    /// Counts the beams that the plan brings back from host memory.
    pub(super) fn note_beams(&mut self, plan: &StepPlan) {
        let comes_back = |id: RequestId| {
            let seq = self.scheduler.get(id).filter(|seq| seq.is_follower());
            seq.is_some_and(|seq| plan.swap_in.iter().any(|transfer| seq.table().ids().contains(&transfer.block)))
        };
        self.stats.restored_beams += plan.rows.iter().filter(|row| comes_back(row.request)).count() as u64;
    }

    /// Counts what the plan does with gangs, and holds each against its search.
    pub(super) fn check_searches(&mut self, plan: &StepPlan) -> Result<(), String> {
        let is_gang_reason = |(_, reason): &&(RequestId, WaitReason)| matches!(reason, WaitReason::Gang { .. });
        self.stats.gang_waits += plan.waiting.iter().filter(is_gang_reason).count() as u64;
        for preemption in &plan.preempted {
            let is_gang = self.scheduler.gang_members(preemption.victim).count() > 1;
            self.stats.gang_preemptions += u64::from(is_gang);
            self.stats.gang_swaps += u64::from(is_gang && preemption.mode == PreemptMode::Swap);
        }
        for (i, client) in self.clients.iter().enumerate() {
            let (Some(search), None) = (&client.search, &client.end) else { continue };
            let id = RequestId(i as u64 + 1);
            let beams = (0..search.live.num_live()).map(|beam| search.live.live_tokens(beam));
            if self.scheduler.get(id).is_some() && !self.scheduler.gang_members(id).map(|seq| seq.output()).eq(beams) {
                return Err(format!("the beams of search {id} are not those of its search"));
            }
            let blocks = self.scheduler.gang_blocks(id).unwrap_or_default();
            self.stats.beam_blocks_saved += u64::from(blocks.logical - blocks.held);
        }
        Ok(())
    }
}

impl Search {
    /// The end fits to what the search finds alone.
    pub fn check_outcome(&self, reason: &FinishReason) -> Result<(), String> {
        if self.live.outputs() != self.expected || self.expected.first().map(|best| &best.reason) != Some(reason) {
            return Err(format!("found {:?} ({reason:?}), alone {:?}", self.live.outputs(), self.expected));
        }
        Ok(())
    }
}
