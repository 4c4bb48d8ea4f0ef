//! The same request in every circumstance: each output token and all of its logits must be the same bits as alone.
//!
//! The matrix has a row for each circumstance (a [`World`]) and a column for each model and KV format. A world proves
//! that what it is named after took place: a pool too large to preempt anybody would prove nothing.
//! [`engine`] does the same on the whole engine, where log-probabilities stand for logits.

mod drive;
mod engine;

use std::collections::BTreeMap;
use std::path::PathBuf;

use drive::{Drive, MAX_MODEL_LEN, MAX_SEQS, MAX_TOKENS, Output, PLAIN, Permuted, Request, Setup};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::executor::wgpu_executor::{ExecutorConfig, KvFormat, LoraLimits, WgpuExecutor};
use kvasir::ids::TokenId;
use kvasir::kernels::Class;
use kvasir::kernels::attention_work::Take;
use kvasir::kernels::matmul::Fusion;
use kvasir::kv::CachedContent;
use kvasir::model::Model;
use kvasir::scheduler::PreemptionMode;

use crate::support::{files_with_extension, fixtures, open_gpu};

const BLOCK: u32 = 8;
const HOST_BLOCKS: u32 = 100;
/// Tokens of the pool, whatever the block size.
const POOL_TOKENS: u32 = 1600;

/// A kind of cache on a model.
struct Column {
    name: String,
    model: PathBuf,
    kv: KvFormat,
    has_windows: bool,
}

/// Models with full attention and with windows.
/// Those with windows go through the circumstances that there are for them: nothing of theirs is shared or found in part
/// of a block, or goes to host memory.
fn columns(formats: &[KvFormat]) -> Vec<Column> {
    let mut columns = Vec::new();
    for family in ["llama", "qwen3_bf16", "mistral_swa"] {
        let model = fixtures().join("tiny").join(family);
        if !model.is_dir() {
            println!("skipped: tiny/{family} is in the full fixture set only");
            continue;
        }
        let has_windows = family == "mistral_swa";
        let column =
            |kv: &KvFormat| Column { name: format!("{family} {kv:?}"), model: model.clone(), kv: *kv, has_windows };
        columns.extend(formats.iter().map(column));
    }
    if formats.contains(&KvFormat::F16) {
        columns.extend(quantised_column());
    }
    columns
}

/// A llama whose norms and activations are part of its products.
fn quantised_column() -> Option<Column> {
    let model = files_with_extension(&fixtures().join("gguf/q4_1"), "gguf").pop()?;
    Some(Column { name: "llama q4_1 F16".into(), model, kv: KvFormat::F16, has_windows: false })
}

/// The GPU executor, or `None` (with a line printed) where there is no adapter.
fn on_gpu(column: &Column, block_size: u32) -> Option<WgpuExecutor> {
    open(column, block_size, false)
}

fn open(column: &Column, block_size: u32, canary: bool) -> Option<WgpuExecutor> {
    let gpu = open_gpu()?;
    let model = Model::open(&column.model).unwrap_or_else(|e| panic!("{e}"));
    let cfg = ExecutorConfig {
        num_blocks: POOL_TOKENS / block_size + 1,
        block_size,
        max_tokens_per_step: MAX_TOKENS,
        max_num_seqs: MAX_SEQS,
        max_model_len: MAX_MODEL_LEN,
        precise: column.kv == KvFormat::F32,
        kv: column.kv,
        canary,
        lora: LoraLimits::NONE,
    };
    let executor = WgpuExecutor::new(gpu, &model, cfg, &mut |_| true).unwrap_or_else(|e| panic!("{e}"));
    Some(executor.with_host_blocks(HOST_BLOCKS))
}

fn tokens(len: u32, tag: u32) -> Vec<TokenId> {
    (0..len).map(|i| 3 + (i * 17 + tag * 29) % 200).collect()
}

/// A long one over two ranges of keys, two short ones, and one that begins like the first and goes on otherwise inside a
/// block.
fn requests() -> [Request; 4] {
    let branch = [&tokens(262, 1)[..203], &tokens(9, 7)].concat();
    [(tokens(262, 1), 12), (tokens(21, 2), 24), (tokens(30, 3), 20), (branch, 10)]
}

/// What requests get alone, in one piece, with nothing found.
#[derive(Default)]
struct Alone(BTreeMap<Request, Output>);

impl Alone {
    fn get(&mut self, executor: &mut dyn Executor, request: &Request) -> &Output {
        self.0.entry(request.clone()).or_insert_with(|| {
            let mut drive = Drive::new(executor, PLAIN);
            drive.add(1, request);
            drive.run_to_end();
            assert_eq!((drive.seen.most_rows, drive.seen.chunks[&1]), (1, 1));
            drive.outputs.remove(&1).expect("it ran")
        })
    }

    /// Every request of a world got what it gets alone.
    fn check(&mut self, executor: &mut dyn Executor, ran: &Ran, what: &str) {
        for (id, request) in &ran.requests {
            let (got, want) = (&ran.outputs[id], self.get(executor, request));
            assert_eq!(got.len(), request.1 as usize, "{what}: request {id}");
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(got.0, want.0, "{what}: request {id} has another token {i}");
                assert!(got.1 == want.1, "{what}: request {id}, token {i}: the logits have other bits");
            }
        }
    }
}

/// What a world came to.
struct Ran {
    requests: BTreeMap<u64, Request>,
    outputs: BTreeMap<u64, Output>,
}

fn ran(drive: Drive<'_>) -> Ran {
    Ran { requests: drive.requests, outputs: drive.outputs }
}

/// A circumstance: runs requests on an executor of [`BLOCK`] tokens a block, and asserts that it took place.
type World = fn(&mut dyn Executor) -> Ran;

const WORLDS: [(&str, World); 16] = [
    ("batched", batched),
    ("chunks of 1", |executor| chunked(executor, 1)),
    ("chunks of 7", |executor| chunked(executor, 7)),
    ("chunks of 64", |executor| chunked(executor, 64)),
    ("warm", warm),
    ("found in part", found_in_part),
    ("together on one prefix", together),
    ("preempted", |executor| preempted(executor, PreemptionMode::Recompute)),
    ("swapped", |executor| preempted(executor, PreemptionMode::Swap)),
    ("evicted to host memory", evicted),
    ("choices", choices),
    ("branches", branches),
    ("lost steps", lost_steps),
    ("lost device", lost_device),
    ("other block ids", other_ids),
    ("saved and restored", saved),
];

const WITH_WINDOWS: [&str; 4] = ["batched", "chunks of 1", "chunks of 7", "chunks of 64"];

fn batched(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, PLAIN);
    (1..).zip(&requests()).for_each(|(id, request)| drive.add(id, request));
    drive.run_to_end();
    assert_eq!(drive.seen.most_rows, 4);
    ran(drive)
}

fn chunked(executor: &mut dyn Executor, chunk: u32) -> Ran {
    let mut drive = Drive::new(executor, Setup { chunk, ..PLAIN });
    (1..).zip(&requests()).for_each(|(id, request)| drive.add(id, request));
    drive.run_to_end();
    assert_eq!(drive.seen.chunks[&1], 262u32.div_ceil(chunk));
    ran(drive)
}

const CACHED: Setup = Setup { cache: true, ..PLAIN };

fn warm(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, CACHED);
    let requests = requests();
    for (id, request) in [(1, &requests[0]), (2, &requests[1]), (11, &requests[0]), (12, &requests[1])] {
        drive.add(id, request);
        drive.run_to_end();
    }
    assert_eq!((drive.seen.cached[&1], drive.seen.cached[&2]), (0, 0), "cold");
    assert_eq!((drive.seen.cached[&11], drive.seen.cached[&12]), (261, 20), "all but the last token");
    ran(drive)
}

fn found_in_part(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, CACHED);
    let requests = requests();
    for (id, request) in [(1, &requests[0]), (2, &requests[3])] {
        drive.add(id, request);
        drive.run_to_end();
    }
    assert_eq!((drive.seen.cached[&2], drive.seen.copies), (203, 1), "25 blocks, and three tokens of the next");
    ran(drive)
}

/// Requests that decode beside each other on blocks they share, also those over a whole range of keys.
fn together(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, CACHED);
    let common = tokens(262, 1);
    (1..=3).for_each(|id| drive.add(id, &([&common[..], &tokens(id as u32 * 3, 5)].concat(), 12)));
    drive.run_to_end();
    assert!(drive.seen.cached[&2] >= 256 && drive.seen.cached[&3] >= 256, "{:?}", drive.seen);
    assert!(drive.seen.grouped_rows >= 3 * 10, "they read the prefix together: {:?}", drive.seen);
    ran(drive)
}

fn preempted(executor: &mut dyn Executor, preemption: PreemptionMode) -> Ran {
    // 33 + 3 + 4 blocks hold the prompts, 35 + 6 + 7 the whole.
    let mut drive = Drive::new(executor, Setup { pool: 41, preemption, host_blocks: HOST_BLOCKS, ..PLAIN });
    (1..).zip(&requests()[..3]).for_each(|(id, request)| drive.add(id, request));
    drive.run_to_end();
    let totals = drive.scheduler.totals();
    assert!(totals.preemptions > 0, "{totals:?}");
    match preemption {
        PreemptionMode::Swap => assert!(totals.swaps > 0 && totals.recomputed_tokens == 0, "{totals:?}"),
        _ => assert!(totals.swaps == 0 && totals.recomputed_tokens > 0, "{totals:?}"),
    }
    ran(drive)
}

fn evicted(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, Setup { pool: 40, host_blocks: HOST_BLOCKS, ..CACHED });
    let requests = requests();
    // The second fills the pool, so that what the first left goes to host memory.
    for (id, request) in [(1, &requests[0]), (2, &(tokens(280, 9), 4)), (3, &requests[0]), (4, &requests[3])] {
        drive.add(id, request);
        drive.run_to_end();
    }
    let counts = drive.scheduler.kv().counts();
    assert!(counts.host_hit_tokens >= 200, "{counts:?}");
    ran(drive)
}

fn choices(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, PLAIN);
    for (parent, request) in [(10, &requests()[0]), (20, &requests()[1])] {
        drive.add(parent, request);
        drive.step();
        (1..=2).for_each(|choice| drive.fork(parent, parent + choice, request.0.len(), &[], request.1));
        drive.step();
        assert!(drive.scheduler.kv().counts().saved as usize >= request.0.len() / BLOCK as usize * 2);
        drive.run_to_end();
    }
    assert!(drive.seen.copies >= 4, "each choice copies the last block: {:?}", drive.seen);
    ran(drive)
}

fn branches(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, PLAIN);
    drive.add(1, &requests()[1]);
    (0..8).for_each(|_| drive.step());
    // In the prompt and in the output, at the border of a block and inside.
    let starts: [(usize, &[TokenId]); 5] = [(16, &[5, 6, 7]), (11, &[9]), (24, &[8, 8]), (26, &[]), (23, &[4])];
    for (id, (keep, own)) in (2..).zip(starts) {
        drive.fork(1, id, keep, own, 9);
    }
    drive.run_to_end();
    assert!(drive.seen.copies >= 3, "{:?}", drive.seen);
    ran(drive)
}

fn lost_steps(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, Setup { chunk: 40, ..CACHED });
    (1..).zip(&requests()).for_each(|(id, request)| drive.add(id, request));
    while drive.scheduler.has_work() {
        drive.lose_a_step();
        drive.step();
    }
    assert!(drive.seen.abandoned > 20, "{:?}", drive.seen);
    ran(drive)
}

fn lost_device(executor: &mut dyn Executor) -> Ran {
    let mut drive = Drive::new(executor, CACHED);
    (1..).zip(&requests()).for_each(|(id, request)| drive.add(id, request));
    (0..6).for_each(|_| drive.step());
    drive.lose_the_device();
    drive.run_to_end();
    assert!(drive.scheduler.totals().recomputed_tokens > 262, "{:?}", drive.scheduler.totals());
    ran(drive)
}

/// Everything at once that names blocks: tables, slots, copies and transfers.
fn other_ids(executor: &mut dyn Executor) -> Ran {
    let mut permuted = Permuted(executor);
    let setup = Setup { pool: 43, preemption: PreemptionMode::Swap, host_blocks: HOST_BLOCKS, ..CACHED };
    let mut drive = Drive::new(&mut permuted, setup);
    (1..).zip(&requests()[..3]).for_each(|(id, request)| drive.add(id, request));
    (0..4).for_each(|_| drive.step());
    drive.fork(3, 9, 31, &[5, 6], 12);
    drive.run_to_end();
    drive.add(11, &requests()[3]);
    drive.run_to_end();
    assert!(drive.scheduler.totals().swaps > 0 && drive.seen.copies > 0, "{:?}", drive.scheduler.totals());
    assert!(drive.seen.cached[&11] > 0, "{:?}", drive.seen);
    ran(drive)
}

/// What an idle engine saves, given to a scheduler that knows nothing, on blocks that hold something else.
fn saved(executor: &mut dyn Executor) -> Ran {
    let mut first = Drive::new(&mut *executor, Setup { host_blocks: HOST_BLOCKS, ..CACHED });
    first.add(1, &requests()[0]);
    first.run_to_end();
    let contents = first.save();
    assert_eq!(contents.len(), 34, "262 + 11 computed tokens fill 34 blocks");
    let mut second = Drive::new(&mut *executor, Setup { host_blocks: HOST_BLOCKS, ..CACHED });
    second.lose_the_device();
    for (content, bytes) in contents {
        let slot = second.scheduler.adopt(&content).expect("there is room");
        second.executor.write_host(slot, &bytes).expect("a whole block");
        assert!(second.scheduler.adopt(&content).is_none(), "it is there already");
    }
    second.add(1, &requests()[0]);
    second.run_to_end();
    assert_eq!(second.scheduler.kv().counts().disk_hit_tokens, 256);
    ran(second)
}

fn check_worlds(column: &Column, executor: &mut dyn Executor, alone: &mut Alone) {
    let has_windows = executor.windows() != [None];
    for (name, world) in WORLDS.into_iter().filter(|(name, _)| !has_windows || WITH_WINDOWS.contains(name)) {
        let ran = world(executor);
        alone.check(executor, &ran, &format!("{}, {name}", column.name));
    }
}

fn check_column(column: &Column) -> bool {
    let Some(mut executor) = on_gpu(column, BLOCK) else { return false };
    let mut alone = Alone::default();
    check_worlds(column, &mut executor, &mut alone);
    // The ways to cut attention that do not pay at these sizes.
    for take in [Take::Always, Take::Never] {
        executor.set_attention(take, take);
        let cells = [("batched", batched as World), ("chunks", |e| chunked(e, 7)), ("together", together)];
        let num_cells = if executor.windows() == [None] { 3 } else { 2 };
        for (name, world) in &cells[..num_cells] {
            let ran = world(&mut executor);
            alone.check(&mut executor, &ran, &format!("{}, {name}, attention cut {take:?}", column.name));
        }
    }
    for block_size in [4, 32] {
        let mut other = on_gpu(column, block_size).expect("opened before");
        let ran = batched(&mut other);
        alone.check(&mut executor, &ran, &format!("{}, blocks of {block_size}", column.name));
        let ran = chunked(&mut other, 7);
        alone.check(&mut executor, &ran, &format!("{}, blocks of {block_size}, chunks", column.name));
    }
    true
}

#[test]
fn logits_are_the_same_bits_in_every_circumstance() {
    for column in columns(&[KvFormat::F16, KvFormat::I8]) {
        if !check_column(&column) {
            return;
        }
    }
}

#[test]
fn precise_logits_are_the_same_bits_in_every_circumstance() {
    let Some(column) = columns(&[KvFormat::F32]).into_iter().next() else { return };
    check_column(&column);
}

#[test]
fn logits_of_the_reference_are_the_same_bits_however_they_are_scheduled() {
    let column = &columns(&[KvFormat::F32])[0];
    let model = Model::open(&column.model).unwrap_or_else(|e| panic!("{e}"));
    let cfg = ReferenceConfig { num_blocks: POOL_TOKENS / BLOCK + 1, block_size: BLOCK };
    let executor = ReferenceExecutor::new(&model, cfg).unwrap_or_else(|e| panic!("{e}"));
    let mut executor = executor.with_host_blocks(HOST_BLOCKS);
    let mut alone = Alone::default();
    for (name, world) in
        [("chunks", (|e| chunked(e, 64)) as World), ("swapped", |e| preempted(e, PreemptionMode::Swap))]
    {
        let ran = world(&mut executor);
        alone.check(&mut executor, &ran, &format!("reference, {name}"));
    }
}

#[test]
fn damage_that_is_swapped_out_is_found_when_it_comes_back() {
    // The canary does not know windows.
    for column in columns(&[KvFormat::F16, KvFormat::I8]).into_iter().filter(|column| !column.has_windows) {
        let Some(mut executor) = open(&column, BLOCK, true) else { return };
        let setup = Setup { pool: 41, preemption: PreemptionMode::Swap, host_blocks: HOST_BLOCKS, ..PLAIN };
        let mut drive = Drive::new(&mut executor, setup);
        (1..).zip(&requests()[..3]).for_each(|(id, request)| drive.add(id, request));
        let mut damaged = None;
        while drive.scheduler.has_work() && drive.seen.corrupted.is_empty() {
            drive.step_with(|plan, executor| {
                let (Some(preempted), None) = (plan.preempted.first(), damaged) else { return };
                // The second block that goes to host memory.
                executor.corrupt_block(plan.swap_out[1].block.0).expect("between steps");
                damaged = Some((preempted.victim.0, BLOCK));
            });
        }
        assert!(damaged.is_some(), "{}: nobody was swapped", column.name);
        assert_eq!(drive.seen.corrupted.first().copied(), damaged, "{}", column.name);
    }
}

impl Drive<'_> {
    /// Copies all that is cached to host memory, as an idle engine does, and gives it with its bytes.
    fn save(&mut self) -> Vec<(CachedContent, Vec<u8>)> {
        let (plan, batch) = self.plan_save();
        let handle = self.executor.launch(&batch).expect("launched");
        self.executor.wait(handle).expect("ran");
        self.scheduler.commit(&plan, &[], &[]);
        let contents = self.scheduler.kv().host_contents();
        contents
            .map(|content| {
                let bytes = self.executor.read_host(content.host).expect("stored").to_vec();
                (content, bytes)
            })
            .collect()
    }
}

#[test]
fn a_dense_layer_is_at_most_eight_dispatches() {
    let Some(column) = quantised_column() else { return };
    let Some(mut executor) = on_gpu(&column, BLOCK) else { return };
    let layers = Model::open(&column.model).unwrap_or_else(|e| panic!("{e}")).spec().num_layers;
    let can_fuse = Fusion::is_possible(Class::of(executor.gpu().caps()));
    let mut drive = Drive::new(&mut executor, PLAIN);
    drive.add(1, &(tokens(20, 1), 4));
    drive.run_to_end();
    // Q K V, rope, attention, O, gate and up, down; embedding, first and last norm, head.
    let expect = if can_fuse { 6 * layers + 4 } else { 9 * layers + 3 };
    assert_eq!(drive.seen.dispatches, expect, "of a step that gives logits");
    assert!(!can_fuse || expect <= 8 * layers + 6);
}
