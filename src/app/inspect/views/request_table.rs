//! Requests and steps as tables: why each waits, and the text twins of the pictures. Virtual: only visible rows cost.

use super::paint::{owner_dot, small};
use crate::app::format;
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::requests::{RequestRow, RowState};
use crate::app::inspect::words;
use crate::app::theme::Theme;
use crate::ids::BlockId;
use crate::telemetry::BlockState;
use egui::{Align, Color32, Layout, RichText, Sense, TextWrapMode, Ui};
use egui_extras::{Column, TableBuilder, TableRow};

const ROW: f32 = 20.0;
const HEAD: f32 = 20.0;
const ROW_GAP: f32 = 2.0;

/// A column: its title, its width, and the table width below which it is left out.
struct Col<T> {
    title: &'static str,
    width: f32,
    from: f32,
    text: fn(&T) -> String,
}

const REQUEST_COLS: [Col<RequestRow>; 9] = [
    Col { title: "State", width: 128.0, from: 0.0, text: |r| words::state_words(&r.state) },
    Col { title: "Prompt", width: 54.0, from: 0.0, text: |r| format::count(r.prompt_tokens.into()) },
    Col { title: "Cached", width: 54.0, from: 760.0, text: |r| format::count(r.cached_tokens.into()) },
    Col { title: "Out", width: 46.0, from: 0.0, text: |r| format::count(r.output_tokens.into()) },
    Col { title: "Blocks", width: 50.0, from: 0.0, text: |r| format::count(r.num_blocks.into()) },
    Col { title: "TTFT", width: 62.0, from: 860.0, text: |r| r.ttft_us.map_or("–".to_owned(), format::duration_us) },
    Col { title: "tok/s", width: 46.0, from: 0.0, text: |r| format::rate(r.tokens_per_s) },
    Col { title: "Preempted", width: 66.0, from: 940.0, text: |r| format::count(r.preemptions.into()) },
    Col { title: "Age", width: 64.0, from: 1000.0, text: |r| r.age_us.map_or("–".to_owned(), format::duration_us) },
];

/// The request table at the step shown.
pub fn request_table_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let rows = model.rows();
    if rows.is_empty() {
        ui.label(small("No request is known at this step.", theme.text_weak));
        return;
    }
    let width = ui.available_width();
    let cols: Vec<&Col<RequestRow>> = REQUEST_COLS.iter().filter(|c| width >= c.from).collect();
    let height = whole_rows(ui);
    let mut table = table(ui, "requests").sense(Sense::click()).max_scroll_height(height);
    table = table.column(Column::exact(if width > 700.0 { 190.0 } else { 140.0 }).clip(true));
    for col in &cols {
        table = table.column(Column::exact(col.width).clip(true));
    }
    table = table.column(Column::remainder().at_least(80.0).clip(true));
    table
        .header(HEAD, |mut head| {
            head.col(|ui| title(ui, theme, "Request", false)).1.on_hover_text("Whose it is, and the request's number");
            for (i, col) in cols.iter().enumerate() {
                head.col(|ui| title(ui, theme, col.title, i > 0));
            }
            head.col(|ui| title(ui, theme, "Why waiting", false));
        })
        .body(|body| {
            body.rows(ROW, rows.len(), |mut row| {
                let request = &rows[row.index()];
                row.set_selected(model.selection() == Some(Selection::Request(request.id)));
                request_row(&mut row, model, theme, request, &cols);
                if row.response().clicked() {
                    commands.push(InspectCommand::Select(Selection::Request(request.id)));
                }
            });
        });
}

fn request_row(
    row: &mut TableRow<'_, '_>,
    model: &InspectModel,
    theme: &Theme,
    request: &RequestRow,
    cols: &[&Col<RequestRow>],
) {
    let is_finished = matches!(request.state, RowState::Finished(_));
    let ink = if is_finished { theme.text_weak } else { theme.text };
    row.col(|ui| {
        owner_dot(ui, theme.owner_color(model.hue_of(request.id)));
        cell(ui, &format!("{} #{}", request.label, request.id), ink);
    });
    for (i, col) in cols.iter().enumerate() {
        let text = (col.text)(request);
        row.col(|ui| if i == 0 { cell(ui, &text, state_ink(theme, &request.state)) } else { number(ui, &text, ink) });
    }
    row.col(|ui| cell(ui, &words::why_waiting(request), theme.warn));
}

fn state_ink(theme: &Theme, state: &RowState) -> Color32 {
    match state {
        RowState::Waiting { was_preempted: true, .. } => theme.error,
        RowState::Waiting { .. } => theme.warn,
        RowState::Reading { .. } => theme.accent,
        RowState::Decoding => theme.success,
        RowState::Idle => theme.text,
        RowState::Finished(_) => theme.text_weak,
    }
}

fn table<'a>(ui: &'a mut Ui, id: &str) -> TableBuilder<'a> {
    ui.spacing_mut().item_spacing = egui::vec2(12.0, ROW_GAP);
    TableBuilder::new(ui)
        .id_salt(id)
        .striped(false)
        .auto_shrink(false)
        .min_scrolled_height(0.0)
        .cell_layout(Layout::left_to_right(Align::Center))
}

/// What is left under the head for rows, without a last one that is cut.
fn whole_rows(ui: &Ui) -> f32 {
    let pitch = ROW + ROW_GAP;
    let room = ui.available_height() - HEAD - ROW_GAP;
    if room > 2.0 * pitch { (room / pitch).floor() * pitch - ROW_GAP } else { room.max(ROW) }
}

fn title(ui: &mut Ui, theme: &Theme, text: &str, is_number: bool) {
    let text = small(text, theme.text_weak);
    if is_number {
        ui.with_layout(Layout::right_to_left(Align::Center), |ui| ui.label(text));
    } else {
        ui.label(text);
    }
}

fn cell(ui: &mut Ui, text: &str, ink: Color32) {
    if !text.is_empty() {
        let label = egui::Label::new(RichText::new(text).color(ink)).wrap_mode(TextWrapMode::Truncate);
        ui.add(label.selectable(false).sense(Sense::hover()));
    }
}

fn number(ui: &mut Ui, text: &str, ink: Color32) {
    ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
        ui.add(egui::Label::new(RichText::new(text).color(ink)).selectable(false));
    });
}

/// The timeline as a table, newest step first.
pub fn steps_table_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let history = model.history();
    let mut table = table(ui, "steps").sense(Sense::click());
    for width in [64.0, 70.0, 66.0, 66.0, 66.0, 66.0, 66.0, 76.0] {
        table = table.column(Column::exact(width).clip(true));
    }
    table
        .column(Column::remainder().at_least(80.0).clip(true))
        .header(HEAD, |mut head| {
            let titles =
                ["Step", "Time", "Tokens", "Prefill", "Decodes", "Running", "Waiting", "KV used", "What happened"];
            for (i, text) in titles.into_iter().enumerate() {
                head.col(|ui| title(ui, theme, text, i < 8));
            }
        })
        .body(|body| {
            body.rows(ROW, history.len(), |mut row| {
                let Some(entry) = history.get(history.len() - 1 - row.index()) else { return };
                let r = &entry.record;
                row.set_selected(model.step() == Some(r.step));
                let numbers = [
                    format::count(r.step),
                    format::duration_us(r.total_us.into()),
                    format::count(r.num_tokens().into()),
                    format::count(r.num_prefill_tokens().into()),
                    format::count(r.num_decode().into()),
                    format::count(r.num_running.into()),
                    format::count(r.num_waiting.into()),
                    format::count(r.kv.used.into()),
                ];
                for text in numbers {
                    row.col(|ui| number(ui, &text, theme.text));
                }
                let events = words::event_lines(r, |id| model.requests().label(id)).join("; ");
                row.col(|ui| cell(ui, &events, theme.text_weak));
                if row.response().clicked() {
                    commands.push(InspectCommand::GoToStep(r.step));
                }
            });
        });
}

/// The block map as a table: every block that is not free. `blocks` is their list, made when the map changed.
pub fn blocks_table_ui(
    ui: &mut Ui,
    blocks: &[BlockId],
    model: &InspectModel,
    map: &BlockMap,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    if blocks.is_empty() {
        ui.label(small("Every block is free.", theme.text_weak));
        return;
    }
    let mut table = table(ui, "blocks").sense(Sense::click());
    for width in [56.0, 130.0, 180.0, 60.0, 76.0, 76.0] {
        table = table.column(Column::exact(width).clip(true));
    }
    table
        .column(Column::remainder().at_least(80.0).clip(true))
        .header(HEAD, |mut head| {
            let titles = ["Block", "State", "Owner", "Place", "Filled", "Last step", "Hash"];
            for text in titles {
                head.col(|ui| title(ui, theme, text, false));
            }
        })
        .body(|body| {
            body.rows(ROW, blocks.len(), |mut row| {
                let block = blocks[row.index()];
                let Some(c) = map.cell(block) else { return };
                row.set_selected(model.selection() == Some(Selection::Block(block)));
                row.col(|ui| cell(ui, &block.to_string(), theme.text));
                row.col(|ui| cell(ui, &words::block_state_words(c), theme.text));
                row.col(|ui| {
                    owner_dot(ui, theme.owner_color(model.hue_of(c.owner)));
                    cell(ui, &model.owner_of(c.owner).label, theme.text);
                });
                row.col(|ui| cell(ui, &(c.logical + 1).to_string(), theme.text));
                row.col(|ui| cell(ui, &format!("{}/{}", c.filled, model.snapshot().block_size), theme.text));
                row.col(|ui| cell(ui, &format::count(c.last_step.into()), theme.text));
                let hash = c.hash.map_or(String::new(), |h| format!("{h:016x}"));
                row.col(|ui| cell(ui, &hash, theme.text_weak));
                if row.response().clicked() {
                    commands.push(InspectCommand::Select(Selection::Block(block)));
                }
            });
        });
}

/// The blocks that [`blocks_table_ui`] lists.
pub fn listed_blocks(map: &BlockMap) -> Vec<BlockId> {
    let is_listed = |c: &crate::app::inspect::map::Cell| !matches!(c.state, BlockState::Free | BlockState::Null);
    (0u32..).zip(map.cells()).filter(|(_, c)| is_listed(c)).map(|(i, _)| BlockId(i)).collect()
}
