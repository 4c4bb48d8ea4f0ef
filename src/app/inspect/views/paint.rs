//! Small things that all views of Inspect draw with: cards, chips, owner dots, marks, quads.

use crate::app::theme::{Theme, font_size, radius, space};
use egui::emath::GuiRounding as _;
use egui::{
    Align, Align2, Color32, CornerRadius, FontId, Layout, Mesh, Painter, Pos2, Rect, Response, RichText, Role, Sense,
    Shape, Stroke, StrokeKind, Ui, UiBuilder, Vec2, WidgetInfo, pos2, vec2,
};

/// Draws `add` inside a card that fills `rect`.
pub fn card_ui<R>(ui: &mut Ui, rect: Rect, theme: &Theme, name: &str, add: impl FnOnce(&mut Ui) -> R) -> R {
    let corner = CornerRadius::same(radius::LARGE);
    ui.painter().rect(rect, corner, theme.bg_panel, Stroke::new(1.0, theme.border), StrokeKind::Inside);
    let inner = rect.shrink2(vec2(space::M, space::S + 2.0));
    let builder = UiBuilder::new()
        .max_rect(inner)
        .id_salt(name)
        .layout(Layout::top_down(Align::Min))
        .accessibility_role(Role::Region)
        .accessibility_label(name);
    ui.scope_builder(builder, |ui| {
        ui.shrink_clip_rect(rect.shrink(1.0));
        add(ui)
    })
    .inner
}

/// A one-line header: title left, `controls` right to left.
pub fn header_ui(ui: &mut Ui, theme: &Theme, title: &str, left: impl FnOnce(&mut Ui), right: impl FnOnce(&mut Ui)) {
    ui.horizontal(|ui| {
        ui.set_min_height(24.0);
        ui.label(title_text(theme, title));
        left(ui);
        ui.with_layout(Layout::right_to_left(Align::Center), right);
    });
}

pub fn title_text(theme: &Theme, title: &str) -> RichText {
    RichText::new(title).size(font_size::BODY).strong().color(theme.text_strong)
}

pub fn small(text: impl Into<String>, color: Color32) -> RichText {
    RichText::new(text).size(font_size::SMALL).color(color)
}

pub fn small_font() -> FontId {
    FontId::proportional(font_size::SMALL)
}

/// A quiet button that belongs to a header.
pub fn quiet_button(ui: &mut Ui, text: &str, hint: &str) -> Response {
    let button = egui::Button::new(RichText::new(text).size(font_size::SMALL)).min_size(vec2(24.0, 22.0));
    let response = ui.add(button);
    // A sign alone is no name.
    if !text.chars().any(char::is_alphabetic) {
        response.widget_info(|| WidgetInfo::labeled(Role::Button, true, hint));
    }
    response.on_hover_text(hint)
}

/// A quiet button that stays pressed.
pub fn quiet_toggle(ui: &mut Ui, on: &mut bool, text: &str, hint: &str) {
    let button = egui::Button::selectable(*on, RichText::new(text).size(font_size::SMALL)).min_size(vec2(24.0, 22.0));
    if ui.add(button).on_hover_text(hint).clicked() {
        *on = !*on;
    }
}

/// One of several choices, side by side.
pub fn segmented<T: Copy + PartialEq>(ui: &mut Ui, theme: &Theme, value: &mut T, choices: &[(T, &str, &str)]) {
    egui::Frame::new().fill(theme.bg_sunken).corner_radius(CornerRadius::same(radius::MEDIUM)).inner_margin(2).show(
        ui,
        |ui| {
            ui.spacing_mut().item_spacing.x = 2.0;
            for (choice, label, hint) in choices {
                let text = RichText::new(*label).size(font_size::SMALL);
                let button = egui::Button::selectable(*value == *choice, text).min_size(vec2(24.0, 20.0));
                if ui.add(button).on_hover_text(*hint).clicked() {
                    *value = *choice;
                }
            }
        },
    );
}

/// The dot that stands for an owner, in a line of text.
pub fn owner_dot(ui: &mut Ui, color: Color32) {
    let (rect, _) = ui.allocate_exact_size(vec2(8.0, ui.text_style_height(&egui::TextStyle::Small)), Sense::hover());
    ui.painter().circle_filled(rect.center(), 4.0, color);
}

/// A picture with text: what a screen reader says, and what tests read.
pub fn describe(response: &Response, words: &str) {
    response.widget_info(|| WidgetInfo::labeled(Role::GraphicsObject, true, words));
}

/// `text` cut to `width` points with an ellipsis, drawn at `pos`.
pub fn text_clipped(painter: &Painter, pos: Pos2, anchor: Align2, text: &str, width: f32, color: Color32) -> Rect {
    let mut job = egui::text::LayoutJob::simple_singleline(text.to_owned(), small_font(), color);
    job.wrap = egui::text::TextWrapping::truncate_at_width(width);
    let galley = painter.layout_job(job);
    let rect = anchor.anchor_size(pos, galley.size());
    painter.galley(rect.min, galley, color);
    rect
}

/// Rounds to whole pixels, so that quads without smoothing are sharp.
pub fn snap(ui: &Ui, rect: Rect) -> Rect {
    rect.round_to_pixels(ui.pixels_per_point())
}

/// Many rectangles as one shape.
#[derive(Default)]
pub struct Quads {
    mesh: Mesh,
}

impl Quads {
    pub fn rect(&mut self, rect: Rect, color: Color32) {
        self.mesh.add_colored_rect(rect, color);
    }

    /// A hollow rectangle, `width` points thick, inside `rect`.
    pub fn outline(&mut self, rect: Rect, width: f32, color: Color32) {
        let inner = rect.shrink(width);
        self.rect(Rect::from_min_max(rect.min, pos2(rect.right(), inner.top())), color);
        self.rect(Rect::from_min_max(pos2(rect.left(), inner.bottom()), rect.max), color);
        self.rect(Rect::from_min_max(pos2(rect.left(), inner.top()), pos2(inner.left(), inner.bottom())), color);
        self.rect(Rect::from_min_max(pos2(inner.right(), inner.top()), pos2(rect.right(), inner.bottom())), color);
    }

    pub fn triangle(&mut self, points: [Pos2; 3], color: Color32) {
        let first = self.mesh.vertices.len() as u32;
        for p in points {
            self.mesh.colored_vertex(p, color);
        }
        self.mesh.add_triangle(first, first + 1, first + 2);
    }

    /// Three stripes from lower left to upper right.
    pub fn hatch(&mut self, rect: Rect, color: Color32) {
        let s = rect.width();
        let w = (s * 0.16).max(1.0);
        for shift in [-0.5, 0.0, 0.5] {
            // A band along the diagonal, cut to the cell by clamping its corners.
            let at = |t: f32| (t + shift * s).clamp(0.0, s);
            let (a, b) = (at(0.0), at(s));
            let low = pos2(rect.left() + a, rect.bottom() - at(0.0).min(a) + (shift.min(0.0) * s));
            let high = pos2(rect.left() + b, rect.top() + (shift.max(0.0) * s));
            let low = pos2(low.x, low.y.clamp(rect.top(), rect.bottom()));
            self.triangle([low, pos2(low.x + w, low.y), high], color);
            self.triangle([pos2(low.x + w, low.y), high, pos2(high.x - w, high.y)], color);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.mesh.is_empty()
    }

    pub fn paint(self, painter: &Painter) {
        if !self.is_empty() {
            painter.add(Shape::mesh(self.mesh));
        }
    }
}

/// A mark of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Tokens found in the prefix cache: a star.
    Hit,
    /// Taken out of the batch: a flash.
    Preempt,
    /// The end: a square.
    Finish,
}

/// Draws `mark` centred at `c`, about 9 points tall.
pub fn paint_mark(painter: &Painter, mark: Mark, c: Pos2, theme: &Theme) {
    let outline = Stroke::new(1.0, theme.bg_panel);
    match mark {
        Mark::Hit => {
            painter.add(star(c, 5.2, theme.warn, outline));
        }
        Mark::Preempt => {
            let p = |x: f32, y: f32| c + vec2(x, y);
            let flash = [p(1.0, -5.5), p(-3.0, 1.0), p(-0.2, 1.0), p(-1.2, 5.5), p(3.0, -1.2), p(0.2, -1.2)];
            let mut quads = Quads::default();
            for (a, b, d) in [(0, 1, 2), (0, 2, 5), (5, 2, 4), (4, 2, 3)] {
                quads.triangle([flash[a], flash[b], flash[d]], theme.error);
            }
            quads.paint(painter);
        }
        Mark::Finish => {
            painter.rect_filled(Rect::from_center_size(c, Vec2::splat(6.0)), 1.0, theme.text_strong);
        }
    }
}

fn star(c: Pos2, r: f32, fill: Color32, outline: Stroke) -> Shape {
    let point = |i: usize, radius: f32| {
        let angle = std::f32::consts::TAU * (i as f32 / 10.0) - std::f32::consts::FRAC_PI_2;
        c + radius * vec2(angle.cos(), angle.sin())
    };
    let points: Vec<Pos2> = (0..10).map(|i| point(i, if i % 2 == 0 { r } else { r * 0.45 })).collect();
    // A star is not convex: the fan from its centre is.
    let mut mesh = Mesh::default();
    mesh.colored_vertex(c, fill);
    for p in &points {
        mesh.colored_vertex(*p, fill);
    }
    for i in 0..10u32 {
        mesh.add_triangle(0, 1 + i, 1 + (i + 1) % 10);
    }
    Shape::Vec(vec![Shape::closed_line(points, outline), Shape::mesh(mesh)])
}
