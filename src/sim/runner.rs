//! Runs one world to its end, as an engine would, and holds every step against the rules.

use super::WorldStats;
use super::beams::Search;
use super::disk::Disk;
use super::mirror::Mirror;
use super::oracle::{self, Expected};
use super::prefixes::Prefixes;
use super::rng::Rng;
use super::world::{FIRST_PIN, StopString, World};
use crate::batch::StepBatch;
use crate::executor::paged_fake::{Attention, FakeConfig, Fault, PagedFake, Reply};
use crate::executor::{ExecError, Executor};
use crate::ids::{BlockId, RequestId, TokenId};
use crate::kv::KvCache;
use crate::protocol::{FinishReason, RunError};
use crate::scheduler::{Ended, NewSequence, PlanInputs, PreemptCosts, Scheduler, StepPlan, WaitReason};
use std::time::Duration;

/// No world needs as many steps.
const MAX_STEPS: u64 = 20_000;

/// Runs the world of this seed; the error says what went wrong and in which step.
pub fn run_world(seed: u64) -> Result<WorldStats, String> {
    let mut rng = Rng::new(seed);
    let world = World::new(&mut rng);
    let mut run = Run::new(world, rng);
    while run.has_work() {
        run.step().map_err(|message| format!("step {}: {message}", run.step))?;
        if run.step > MAX_STEPS {
            return Err(format!("work is left after {MAX_STEPS} steps"));
        }
    }
    run.check_end()?;
    Ok(run.stats)
}

/// What has become of a request.
pub(super) struct Client {
    /// What it asked for, a fork with all its tokens.
    pub new: NewSequence,
    /// `None` when it must be refused.
    pub expected: Option<Expected>,
    pub output: Vec<TokenId>,
    /// More than 1: forks follow once its prompt is computed.
    pub num_choices: u32,
    stop_string: Option<StopString>,
    /// It is a beam search.
    pub search: Option<Search>,
    was_aborted: bool,
    pub end: Option<Result<FinishReason, RunError>>,
}

impl Client {
    /// `capacity` is the pool that it may come to use, in blocks.
    pub fn new(world: &World, new: NewSequence, capacity: u32, stop_string: Option<StopString>) -> Self {
        Client {
            expected: (!oracle::is_impossible(world, &new, capacity)).then(|| oracle::alone(world, &new, capacity)),
            new,
            output: Vec::new(),
            num_choices: 1,
            stop_string,
            search: None,
            was_aborted: false,
            end: None,
        }
    }
}

pub(super) struct Run {
    pub world: World,
    pub rng: Rng,
    pub scheduler: Scheduler,
    executor: PagedFake,
    batch: StepBatch,
    mirror: Mirror,
    /// Client i submitted request i + 1.
    pub clients: Vec<Client>,
    disk: Disk,
    /// Of the world's requests.
    num_arrived: usize,
    pub num_forks: u32,
    pub prefixes: Prefixes,
    step: u64,
    num_not_finite: u64,
    pub stats: WorldStats,
}

impl Run {
    fn new(world: World, rng: Rng) -> Self {
        let executor = PagedFake::new(fake_config(&world))
            .with_windows(&world.kv.groups.windows().collect::<Vec<_>>())
            .with_host_blocks(world.num_host_blocks);
        let kv = new_cache(&world);
        Run {
            scheduler: Scheduler::new(world.scheduler, kv),
            mirror: Mirror::new(world.kv.num_blocks),
            executor,
            batch: StepBatch::default(),
            clients: Vec::new(),
            disk: Disk::default(),
            num_arrived: 0,
            num_forks: 0,
            prefixes: Prefixes::default(),
            step: 0,
            num_not_finite: 0,
            stats: WorldStats { requests: world.requests.len() as u64, ..WorldStats::default() },
            world,
            rng,
        }
    }

    fn has_work(&self) -> bool {
        self.scheduler.has_work() || self.num_arrived < self.world.requests.len() || self.prefixes.are_left(&self.world)
    }

    fn step(&mut self) -> Result<(), String> {
        self.step += 1;
        self.save_sometimes()?;
        self.prefixes.step(self.step, &self.world, &mut self.scheduler, &mut self.rng, &mut self.stats);
        self.arrivals(false)?;
        self.random_fork(false)?;
        self.random_abort();
        self.read_ends()?;
        let fault = self.draw_fault();
        let before = matches!(fault, Some(Fault::Launch(_))).then(|| self.scheduler.state());
        let inputs = self.draw_inputs();
        let plan = self.scheduler.plan_step(inputs);
        self.note_plan(&plan);
        self.disk.keep(self.scheduler.take_spilled(), &self.executor)?;
        if plan.is_empty() {
            self.scheduler.commit(&plan, &[], &[]);
            return self.after_step();
        }
        self.batch.build(&plan, &self.scheduler);
        if let Some(fault) = fault {
            self.num_not_finite += u64::from(matches!(fault, Fault::NotFinite(_)) && plan.num_logits() > 0);
            self.executor.inject(fault);
        }
        let handle = match self.executor.launch(&self.batch) {
            Ok(handle) => handle,
            Err(ExecError::Rejected(text)) if !text.starts_with("injected") => return Err(text),
            Err(_) => {
                self.stats.released_steps += 1;
                self.stats.failed_copies += u64::from(!plan.copies.is_empty());
                self.scheduler.release(&plan);
                if before.is_some_and(|before| before != self.scheduler.state()) {
                    return Err("a step that never ran left a trace".into());
                }
                return self.after_step();
            }
        };
        // Clients come, go and finish while the step is in flight.
        self.arrivals(true)?;
        self.random_fork(true)?;
        self.random_abort();
        self.stop_strings(true);
        match self.executor.wait(handle) {
            Ok(output) => {
                let advances = self.advance_searches(&plan, &output)?;
                let committed = self.scheduler.commit_gangs(&plan, &output.tokens, &output.not_finite, &advances);
                for row in &committed.rows {
                    if let Some(token) = row.token {
                        self.receive(row.request, token)?;
                        self.force_sometimes(row.request)?;
                        self.fork_choices(row.request)?;
                    }
                }
                self.stop_strings(false);
            }
            Err(ExecError::DeviceLost(_)) => self.restart(),
            Err(ExecError::Rejected(text)) if !text.starts_with("injected") => return Err(text),
            Err(_) => {
                self.stats.abandoned_steps += 1;
                self.stats.failed_transfers += (plan.swap_out.len() + plan.swap_in.len()) as u64;
                self.stats.failed_copies += u64::from(!plan.copies.is_empty());
                self.scheduler.abandon(&plan);
            }
        }
        self.after_step()?;
        self.check_searches(&plan)
    }

    fn arrivals(&mut self, in_flight: bool) -> Result<(), String> {
        while let Some(request) = self.world.requests.get(self.num_arrived) {
            if request.arrives_at > self.step {
                break;
            }
            self.num_arrived += 1;
            let (new, num_choices, stop_string) = (request.new.clone(), request.num_choices, request.stop_string);
            if let Some(params) = request.beams.clone() {
                self.submit_search(new, params)?;
                continue;
            }
            if !in_flight {
                let slots = self.disk.bring(&mut self.scheduler, &mut self.executor, &new)?;
                let events = self.scheduler.drain_block_events();
                events.for_each(|event| self.mirror.apply(event));
                slots.into_iter().for_each(|host| self.mirror.adopt(host));
            }
            self.submit(new, stop_string, Scheduler::add)?;
            if let Some(client) = self.clients.last_mut() {
                client.num_choices = num_choices;
            }
        }
        Ok(())
    }

    /// Blocks that a new request may come to use, beside what is pinned.
    pub fn capacity_for(&self, new: &NewSequence) -> u32 {
        self.prefixes.room_for(new, &self.world, &self.scheduler)
    }

    /// A new client, with the next id.
    pub fn submit(
        &mut self,
        new: NewSequence,
        stop_string: Option<StopString>,
        add: fn(&mut Scheduler, NewSequence) -> Result<(), RunError>,
    ) -> Result<(), String> {
        let new = NewSequence { id: RequestId(self.clients.len() as u64 + 1), ..new };
        let capacity = self.capacity_for(&new);
        let client = Client::new(&self.world, new.clone(), capacity, stop_string);
        let taken = add(&mut self.scheduler, new);
        self.enter(client, taken)
    }

    /// A client comes in with the scheduler's answer, which must be what the world allows.
    pub(super) fn enter(&mut self, mut client: Client, taken: Result<(), RunError>) -> Result<(), String> {
        let is_impossible = client.expected.is_none();
        match taken {
            Ok(()) if is_impossible => return Err("a request that can never fit was taken".into()),
            Err(error) if !is_impossible && !matches!(error, RunError::QueueFull { .. }) => {
                return Err(format!("a request that fits was refused: {error}"));
            }
            Ok(()) => {}
            Err(error) => {
                self.stats.refused += 1;
                client.end = Some(Err(error));
            }
        }
        self.clients.push(client);
        Ok(())
    }

    fn random_abort(&mut self) {
        if self.clients.is_empty() || !self.rng.percent(self.world.abort_percent) {
            return;
        }
        let id = RequestId(u64::from(self.rng.range(1, self.clients.len() as u32)));
        let party = self.party(id);
        if self.scheduler.abort(id) {
            self.clients[party.idx() - 1].was_aborted = true;
        }
    }

    /// Ends the requests whose stop string is complete.
    fn stop_strings(&mut self, in_flight: bool) {
        for (i, client) in self.clients.iter_mut().enumerate() {
            let is_seen =
                |stop: &StopString| stop.in_flight == in_flight && stop.after_tokens as usize == client.output.len();
            if client.end.is_none() && client.stop_string.as_ref().is_some_and(is_seen) {
                let reason = FinishReason::StopString("stop".into());
                let was_live = self.scheduler.finish(RequestId(i as u64 + 1), reason);
                self.stats.finished_in_flight += u64::from(was_live && in_flight);
            }
        }
    }

    fn receive(&mut self, request: RequestId, token: TokenId) -> Result<(), String> {
        self.stats.tokens += 1;
        if request.0 >= FIRST_PIN {
            return Ok(());
        }
        let client = &mut self.clients[request.idx() - 1];
        let at = client.output.len();
        client.output.push(token);
        match client.expected.as_ref().and_then(|expected| expected.output.get(at)) {
            Some(expected) if *expected == token => Ok(()),
            expected => Err(format!("request {request} got token {token} as output {at}, alone it gets {expected:?}")),
        }
    }

    /// Says some of the next tokens before they are sampled, as a grammar does that leaves no choice.
    fn force_sometimes(&mut self, request: RequestId) -> Result<(), String> {
        let percent = self.world.force_percent;
        if request.0 >= FIRST_PIN || percent == 0 || !self.rng.percent(percent) {
            return Ok(());
        }
        for _ in 0..self.rng.range(1, 6) {
            let client = &self.clients[request.idx() - 1];
            let at = client.output.len();
            let is_stopping = client.stop_string.as_ref().is_some_and(|stop| stop.after_tokens as usize <= at);
            let next = client.expected.as_ref().and_then(|expected| expected.output.get(at)).copied();
            let (Some(token), true, false) = (next, self.scheduler.can_force(request), is_stopping) else { break };
            self.scheduler.force(request, token);
            self.stats.forced_tokens += 1;
            self.receive(request, token)?;
        }
        Ok(())
    }

    fn draw_fault(&mut self) -> Option<Fault> {
        if !self.rng.percent(self.world.fault_percent) {
            return None;
        }
        let text = String::from("injected");
        Some(match self.rng.range(0, 9) {
            0..=2 => Fault::Launch(ExecError::Rejected(text)),
            3..=4 => Fault::Launch(ExecError::OutOfMemory(text)),
            5..=6 => Fault::Wait(ExecError::OutOfMemory(text)),
            7 => Fault::Wait(ExecError::Rejected(text)),
            8 => Fault::Wait(ExecError::DeviceLost(text)),
            _ => Fault::NotFinite(self.rng.range(0, 7)),
        })
    }

    fn draw_inputs(&mut self) -> PlanInputs {
        let full = self.world.scheduler.max_tokens_per_step;
        let costs = match self.world.num_host_blocks {
            0 => PreemptCosts::default(),
            _ => PreemptCosts {
                recompute_token_ns: self.rng.range(0, 100).into(),
                swap_block_ns: self.rng.range(0, 400).into(),
            },
        };
        if !self.world.varies_budget {
            return PlanInputs { step: self.step, max_tokens: full, max_prefill_tokens: full, costs };
        }
        let max_tokens = self.rng.range(1, full + 2);
        PlanInputs { step: self.step, max_tokens, max_prefill_tokens: self.rng.range(0, max_tokens), costs }
    }

    fn note_plan(&mut self, plan: &StepPlan) {
        self.stats.steps += 1;
        self.stats.preemptions += plan.preempted.len() as u64;
        self.note_beams(plan);
        self.stats.demoted += (plan.swap_out.len() as u64).saturating_sub(plan.preempted.len() as u64);
        let num_one = plan.rows.iter().filter(|row| row.num_tokens == 1).count();
        self.stats.logits_only += plan.rows.iter().filter(|row| row.write_from == row.to()).count() as u64;
        self.stats.mixed_steps += u64::from(num_one > 0 && num_one < plan.rows.len());
        let is_share = |waits: &(RequestId, WaitReason)| matches!(waits.1, WaitReason::Share { .. });
        self.stats.waits_for_share += u64::from(plan.waiting.iter().any(is_share));
        let counts = self.scheduler.kv().counts();
        self.stats.evictions += u64::from(counts.evicted_this_step);
        self.stats.shared_blocks += u64::from(counts.shared);
        let limit = self.world.scheduler.max_preemptions;
        let is_protected = |p: &&crate::scheduler::Admission| {
            limit > 0 && self.scheduler.get(p.request).is_some_and(|seq| seq.preemptions() == limit)
        };
        let has_holes = |p: &&crate::scheduler::Admission| {
            self.scheduler.get(p.request).is_some_and(|seq| seq.table().ids().first() == Some(&BlockId::NULL))
        };
        self.stats.windowed_hits += plan.admitted.iter().filter(has_holes).count() as u64;
        self.stats.protected += plan.admitted.iter().filter(is_protected).count() as u64;
    }

    /// Copies what is cached to disk, as an idle engine does; some of these steps fail.
    fn save_sometimes(&mut self) -> Result<(), String> {
        if !self.world.has_disk || self.world.num_host_blocks == 0 || !self.rng.percent(5) {
            return Ok(());
        }
        let fault = self.draw_fault().filter(|fault| !matches!(fault, Fault::NotFinite(_)));
        let before = matches!(fault, Some(Fault::Launch(_))).then(|| self.scheduler.state());
        let disk = &self.disk;
        let plan = self.scheduler.plan_save(self.step, 4, &|id| disk.has(id));
        self.disk.keep(self.scheduler.take_spilled(), &self.executor)?;
        self.step += 1;
        if plan.is_empty() {
            self.scheduler.commit(&plan, &[], &[]);
            return self.after_step();
        }
        self.batch.build(&plan, &self.scheduler);
        fault.into_iter().for_each(|fault| self.executor.inject(fault));
        match self.executor.launch(&self.batch).map(|handle| self.executor.wait(handle)) {
            Ok(Ok(_)) => drop(self.scheduler.commit(&plan, &[], &[])),
            Ok(Err(ExecError::DeviceLost(_))) => self.restart(),
            Ok(Err(_)) => {
                self.stats.failed_transfers += plan.swap_out.len() as u64;
                self.scheduler.abandon(&plan);
            }
            Err(_) => {
                self.scheduler.release(&plan);
                if before.is_some_and(|before| before != self.scheduler.state()) {
                    return Err("a copy that never ran left a trace".into());
                }
            }
        }
        self.disk.keep(self.scheduler.kv().host_contents().collect(), &self.executor)?;
        self.after_step()
    }

    fn restart(&mut self) {
        self.stats.restarts += 1;
        self.collect_totals();
        self.scheduler.restart(new_cache(&self.world));
        self.mirror = Mirror::new(self.world.kv.num_blocks);
    }

    fn after_step(&mut self) -> Result<(), String> {
        self.read_ends()?;
        let events: Vec<_> = self.scheduler.drain_block_events().collect();
        events.into_iter().for_each(|event| self.mirror.apply(event));
        for change in self.scheduler.take_prefix_changes() {
            self.mirror.change(change)?;
        }
        self.mirror.check(self.scheduler.kv())?;
        self.scheduler.check_integrity()
    }

    fn read_ends(&mut self) -> Result<(), String> {
        for Ended { request, outcome, usage, .. } in self.scheduler.take_ended() {
            if request.0 >= FIRST_PIN {
                self.prefixes.ended(request, &outcome, &mut self.stats)?;
                continue;
            }
            let client = &mut self.clients[request.idx() - 1];
            if client.end.is_some() {
                return Err(format!("request {request} ended twice"));
            }
            if usage.output_tokens as usize != client.output.len() && client.search.is_none() {
                let sent = client.output.len();
                return Err(format!("request {request} ended with {} tokens, {sent} were sent", usage.output_tokens));
            }
            check_outcome(client, &outcome).map_err(|message| format!("request {request} {message}"))?;
            match &outcome {
                Ok(FinishReason::Aborted) => self.stats.aborted += 1,
                Ok(FinishReason::StopToken(_)) => self.stats.stopped_by_token += 1,
                Ok(FinishReason::ContextFull) => self.stats.context_full += 1,
                Err(_) => self.stats.not_finite += 1,
                Ok(_) => {}
            }
            client.end = Some(outcome);
        }
        Ok(())
    }

    fn collect_totals(&mut self) {
        let counts = self.scheduler.kv().counts();
        self.stats.hit_tokens += counts.hit_tokens;
        self.stats.host_hit_tokens += counts.host_hit_tokens;
        self.stats.disk_hit_tokens += counts.disk_hit_tokens;
        self.stats.partial_hit_tokens += counts.partial_hit_tokens;
        self.stats.copied_blocks += counts.copied_blocks;
    }

    /// Invariant 18, and every client was told of its end.
    fn check_end(&mut self) -> Result<(), String> {
        self.prefixes.check_end(&mut self.scheduler, &mut self.stats)?;
        self.collect_totals();
        let totals = self.scheduler.totals();
        self.stats.recomputed_tokens = totals.recomputed_tokens;
        (self.stats.swaps, self.stats.restored_tokens) = (totals.swaps, totals.restored_tokens);
        self.stats.slid_blocks = totals.slid_blocks;
        let counts = self.scheduler.kv().counts();
        if counts.free + counts.cached_idle != counts.total {
            return Err(format!("invariant 18: all requests ended, but blocks are held: {counts:?}"));
        }
        if counts.host.swapped != 0 || counts.host.free + counts.host.cached != counts.host.total {
            return Err(format!("all requests ended, but places of host memory are held: {counts:?}"));
        }
        if let Some(i) = self.clients.iter().position(|client| client.end.is_none()) {
            return Err(format!("request {} was never told of its end", i + 1));
        }
        if self.stats.not_finite > self.num_not_finite {
            return Err("more requests failed than faults were injected".into());
        }
        Ok(())
    }
}

fn fake_config(world: &World) -> FakeConfig {
    FakeConfig {
        num_blocks: world.kv.num_blocks,
        block_size: world.kv.block_size,
        vocab_size: world.vocab_size,
        attention: Attention::Every,
        reply: Reply::Tokens,
        step_delay: Duration::ZERO,
        kv_bytes_per_block: 0,
    }
}

fn new_cache(world: &World) -> KvCache {
    let mut kv =
        KvCache::with_hash_mask(world.kv, world.hash_mask).with_host_pool(world.num_host_blocks, world.has_disk);
    kv.keep_changes(true);
    kv
}

/// The end fits to what was sent and to what befell the request.
fn check_outcome(client: &Client, outcome: &Result<FinishReason, RunError>) -> Result<(), String> {
    let expected = client.expected.as_ref().ok_or("ended, but was refused")?;
    match outcome {
        Ok(FinishReason::Aborted) if client.was_aborted => Ok(()),
        Err(RunError::NotFinite { .. }) => Ok(()),
        Ok(reason) if client.search.is_some() => {
            client.search.iter().try_for_each(|search| search.check_outcome(reason))
        }
        Ok(FinishReason::StopString(_))
            if client.stop_string.map(|s| s.after_tokens as usize) == Some(client.output.len()) =>
        {
            Ok(())
        }
        Ok(reason) if *reason == expected.reason && client.output.len() == expected.output.len() => Ok(()),
        other => {
            Err(format!("ended with {other:?} after {} tokens, alone with {:?}", client.output.len(), expected.reason))
        }
    }
}
