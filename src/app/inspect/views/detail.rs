//! The side panel: what is pinned (a block or a request), and the step shown.

use super::paint::{Quads, owner_dot, quiet_button, small, title_text};
use crate::app::format;
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::words;
use crate::app::theme::{Theme, radius, space};
use crate::ids::{BlockId, RequestId};
use crate::telemetry::{BlockDelta, BlockState, StepRecord};
use egui::{CornerRadius, Rect, RichText, ScrollArea, Sense, Ui, pos2, vec2};

/// Selection and step: one above the other, or side by side where there is room; scrolls when it is long.
pub fn detail_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    ScrollArea::vertical().id_salt("detail").auto_shrink(false).show(ui, |ui| {
        ui.spacing_mut().interact_size.y = 18.0;
        if ui.available_width() >= 600.0 {
            ui.columns(2, |columns| {
                selection_ui(&mut columns[0], model, theme, commands);
                step_ui(&mut columns[1], model, theme, commands);
            });
        } else {
            selection_ui(ui, model, theme, commands);
            ui.add_space(space::S);
            ui.separator();
            step_ui(ui, model, theme, commands);
        }
    });
}

fn selection_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    match (model.selection(), model.map()) {
        (Some(Selection::Block(block)), Some(map)) => block_ui(ui, model, map, block, theme, commands),
        (Some(Selection::Request(request)), _) => request_ui(ui, model, request, theme, commands),
        _ => {
            ui.label(title_text(theme, "Nothing selected"));
            ui.label(small("Click a block or a lane to see who holds what, and its relatives.", theme.text_weak));
        }
    }
}

fn head_ui(ui: &mut Ui, theme: &Theme, title: &str, commands: &mut Vec<InspectCommand>) {
    ui.horizontal(|ui| {
        ui.label(title_text(theme, title));
        ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
            if quiet_button(ui, "Clear", "Clear the selection (Esc)").clicked() {
                commands.push(InspectCommand::ClearSelection);
            }
        });
    });
}

fn field(ui: &mut Ui, theme: &Theme, name: &str, value: impl Into<RichText>) {
    ui.label(small(name, theme.text_weak));
    ui.label(value.into().color(theme.text));
    ui.end_row();
}

fn fields(ui: &mut Ui, id: &str, add: impl FnOnce(&mut Ui)) {
    egui::Grid::new(id).num_columns(2).spacing(vec2(space::M, space::XS)).min_col_width(64.0).show(ui, add);
}

fn block_ui(
    ui: &mut Ui,
    model: &InspectModel,
    map: &BlockMap,
    block: BlockId,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let Some(cell) = map.cell(block) else { return };
    head_ui(ui, theme, &format!("Block {block}"), commands);
    let holders = map.holders(block);
    let snapshot = model.snapshot();
    fields(ui, "block fields", |ui| {
        field(ui, theme, "State", words::block_state_words(cell));
        if cell.state == BlockState::Free {
            return;
        }
        field(ui, theme, "References", cell.refs.to_string());
        field(ui, theme, "Place", format!("number {} of its table", cell.logical + 1));
        field(ui, theme, "Filled", format!("{} of {} tokens", cell.filled, snapshot.block_size));
        let hash = cell.hash.map_or("not published".to_owned(), |h| format!("{h:016x}"));
        field(ui, theme, "Hash", RichText::new(hash).monospace());
        if cell.is_pinned {
            field(ui, theme, "Pinned", "by a prefix: never evicted");
        }
        if cell.copied_from != BlockId::NULL {
            field(ui, theme, "Copied", format!("from block {} before a write", cell.copied_from));
        }
        if cell.is_from_host {
            field(ui, theme, "Content", "came back from host memory");
        }
        let parent = map.parent(block).map_or("none (root)".to_owned(), |p| format!("block {p}"));
        field(ui, theme, "Parent", if holders.is_empty() { "–".to_owned() } else { parent });
        field(ui, theme, "Allocated", format!("step {}", format::count(cell.alloc_step.into())));
        field(ui, theme, "Last event", format!("step {}", format::count(cell.last_step.into())));
        if snapshot.kv_bytes_per_block > 0 {
            field(ui, theme, "K and V", format::bytes(snapshot.kv_bytes_per_block));
        }
    });
    ui.add_space(space::XS);
    if holders.is_empty() && cell.state == BlockState::CachedIdle {
        ui.label(small(format!("Last held by {}", model.owner_of(cell.owner).label), theme.text_weak));
    }
    for (request, logical) in &holders {
        holder_ui(ui, model, *request, *logical, theme, commands);
    }
    if quiet_button(ui, "Copy as JSON", "Copy these facts").clicked() {
        ui.copy_text(block_json(model, map, block));
    }
}

fn holder_ui(
    ui: &mut Ui,
    model: &InspectModel,
    request: RequestId,
    logical: u32,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let owner = model.owner_of(request);
    ui.horizontal(|ui| {
        owner_dot(ui, theme.owner_color(owner.hue));
        let label = model.requests().label(request);
        let label = egui::Label::new(RichText::new(label).color(theme.text)).truncate().sense(Sense::click());
        if ui.add(label).on_hover_text("Select this request").clicked() {
            commands.push(InspectCommand::Select(Selection::Request(request)));
        }
        ui.label(small(format!("block {} of its table", logical + 1), theme.text_weak));
    });
}

/// The facts of a block for a bug report.
fn block_json(model: &InspectModel, map: &BlockMap, block: BlockId) -> String {
    let Some(cell) = map.cell(block) else { return String::new() };
    let holders: Vec<_> = map
        .holders(block)
        .into_iter()
        .map(|(r, logical)| serde_json::json!({"request": r.0, "owner": model.owner_of(r).label, "logical": logical}))
        .collect();
    let json = serde_json::json!({
        "block": block.0,
        "step": map.step,
        "state": cell.state,
        "refs": cell.refs,
        "filled": cell.filled,
        "hash": cell.hash.map(|h| format!("{h:016x}")),
        "parent": map.parent(block).map(|p| p.0),
        "alloc_step": cell.alloc_step,
        "last_step": cell.last_step,
        "pinned": cell.is_pinned,
        "copied_from": (cell.copied_from != BlockId::NULL).then_some(cell.copied_from.0),
        "holders": holders,
    });
    format!("{json:#}")
}

fn request_ui(
    ui: &mut Ui,
    model: &InspectModel,
    request: RequestId,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let owner = model.owner_of(request);
    head_ui(ui, theme, &model.requests().label(request), commands);
    let Some(row) = model.rows().iter().find(|r| r.id == request) else {
        ui.label(small("This request is not alive at this step.", theme.text_weak));
        return;
    };
    fields(ui, "request fields", |ui| {
        field(ui, theme, "Request", row.id.to_string());
        field(ui, theme, "State", words::state_words(&row.state));
        let why = words::why_waiting(row);
        if !why.is_empty() {
            field(ui, theme, "Why", why);
        }
        let cached = format!("{} ({} from cache)", format::count(row.prompt_tokens.into()), row.cached_tokens);
        field(ui, theme, "Prompt", cached);
        field(ui, theme, "Output", format::counted(row.output_tokens.into(), "token"));
        field(ui, theme, "Blocks", table_words(model, request));
        if let Some(parent) = model.requests().get(request).and_then(|log| log.parent) {
            field(ui, theme, "Forked from", format!("request {parent}"));
        }
        field(ui, theme, "Rate", format!("{} tok/s", format::rate(row.tokens_per_s)));
        if let Some(us) = row.ttft_us {
            field(ui, theme, "First token", format::duration_us(us));
        }
        field(ui, theme, "Preempted", format::counted(row.preemptions.into(), "time"));
    });
    if quiet_button(ui, "Open chat", "Show the chat that this request belongs to").clicked() {
        commands.push(InspectCommand::OpenOwner(owner.id));
    }
}

fn step_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let Some(entry) = model.entry() else { return };
    let record = &entry.record;
    ui.horizontal(|ui| {
        ui.label(title_text(theme, &format!("Step {}", format::count(record.step))));
        ui.label(small(format::duration_us(record.total_us.into()), theme.text_weak));
    });
    time_bar_ui(ui, record, theme);
    let used = format!(
        "{} of {} tokens in the batch",
        format::count(record.num_tokens().into()),
        format::count(record.budget.into())
    );
    ui.label(small(used, theme.text_weak));
    for row in &record.rows {
        let (owner, label) = (model.owner_of(row.request), model.requests().label(row.request));
        if batch_row_ui(ui, theme, &label, theme.owner_color(owner.hue), &words::row_words(row)).clicked() {
            commands.push(InspectCommand::Select(Selection::Request(row.request)));
        }
    }
    for line in words::event_lines(record, |id| model.requests().label(id)) {
        ui.label(small(line, theme.text_weak));
    }
    ui.label(small(blocks_words(record), theme.text_weak));
}

/// Who and what: the name gives way where both do not fit.
fn batch_row_ui(ui: &mut Ui, theme: &Theme, label: &str, color: egui::Color32, what: &str) -> egui::Response {
    ui.horizontal(|ui| {
        owner_dot(ui, color);
        ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
            ui.label(small(what, theme.text_weak));
            let name = egui::Label::new(RichText::new(label).color(theme.text)).truncate().sense(Sense::click());
            ui.with_layout(egui::Layout::left_to_right(egui::Align::Center), |ui| ui.add(name)).inner
        })
        .inner
    })
    .inner
}

/// "9, of them 6 shared; 3 in host memory; 4 slid out".
fn table_words(model: &InspectModel, request: RequestId) -> String {
    let Some(map) = model.map() else { return "not known at this step".to_owned() };
    let table = map.tables().get(&request).map_or(&[][..], Vec::as_slice);
    let held = table.iter().filter(|b| **b != BlockId::NULL).count();
    let shared = table.iter().filter(|b| map.cell(**b).is_some_and(|c| c.refs >= 2)).count();
    let mut out = held.to_string();
    if shared > 0 {
        out += &format!(", of them {shared} shared");
    }
    if held < table.len() {
        out += &format!("; {} slid out", table.len() - held);
    }
    match map.host().num_of(request) {
        0 => {}
        n => out += &format!("; {n} in host memory"),
    }
    out
}

/// "Blocks: 2 taken, 0 given back, 1 evicted"
fn blocks_words(record: &StepRecord) -> String {
    let count = |f: fn(&BlockDelta) -> bool| record.deltas.iter().filter(|d| f(d)).count();
    format!(
        "Blocks: {} taken, {} shared, {} given back, {} evicted",
        count(|d| matches!(d, BlockDelta::Alloc { .. })),
        count(|d| matches!(d, BlockDelta::Share { .. })),
        count(|d| matches!(d, BlockDelta::Free { .. } | BlockDelta::CacheIdle { .. })),
        count(|d| matches!(d, BlockDelta::Evict { .. })),
    )
}

/// Where the time of the step went: schedule, GPU, output, rest.
fn time_bar_ui(ui: &mut Ui, record: &StepRecord, theme: &Theme) {
    if record.total_us == 0 {
        return;
    }
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 8.0), Sense::hover());
    ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_active);
    let mut quads = Quads::default();
    let mut x = rect.left();
    let parts = [(record.sched_us, theme.warn), (record.gpu_us, theme.accent), (record.output_us, theme.success)];
    for (us, color) in parts {
        let width = (us as f32 / record.total_us as f32 * rect.width()).min(rect.right() - x);
        quads.rect(Rect::from_min_max(pos2(x, rect.top()), pos2(x + width, rect.bottom())), color);
        x += width;
    }
    quads.paint(ui.painter());
    super::paint::describe(&response, &words::time_words(record));
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = space::XS;
        for (name, us, color) in [
            ("schedule", record.sched_us, theme.warn),
            ("GPU", record.gpu_us, theme.accent),
            ("output", record.output_us, theme.success),
        ] {
            owner_dot(ui, color);
            ui.label(small(format!("{name} {} ms", format::ms(us.into())), theme.text_weak));
            ui.add_space(space::XS);
        }
    });
}
