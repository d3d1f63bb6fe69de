//! The syntax tree of a template with every operation that can grow or read much turned into a filter of
//! [`operators`](super::operators) or [`filters`](super::filters), which take from the rendering's budget.
//!
//! The template engine's own instructions for these operations cannot be interrupted or counted, and it computes
//! those on constants when it compiles.

use minijinja::{
    Value,
    machinery::{
        Span,
        ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt, UnaryOpKind},
    },
};

/// The names of the filters that stand for operations; no template can spell them.
pub(super) mod names {
    pub(in crate::template) const ADD: &str = "@add";
    pub(in crate::template) const MUL: &str = "@mul";
    pub(in crate::template) const CONCAT: &str = "@concat";
    pub(in crate::template) const SLICE: &str = "@slice";
    pub(in crate::template) const ITEM: &str = "@item";
    pub(in crate::template) const EQ: &str = "@eq";
    pub(in crate::template) const NE: &str = "@ne";
    pub(in crate::template) const LT: &str = "@lt";
    pub(in crate::template) const LTE: &str = "@lte";
    pub(in crate::template) const GT: &str = "@gt";
    pub(in crate::template) const GTE: &str = "@gte";
    pub(in crate::template) const IN: &str = "@in";
    /// A value that is returned if it can be read as a whole.
    pub(in crate::template) const READABLE: &str = "@readable";
    /// Text between tags.
    pub(in crate::template) const TEXT: &str = "@text";
    /// A value that is stored in an attribute of a namespace.
    pub(in crate::template) const STORED: &str = "@stored";
    /// The values of a `*` or `**` argument.
    pub(in crate::template) const SPREAD: &str = "@spread";
    /// `loop.cycle`, a function.
    pub(in crate::template) const CYCLE: &str = "@cycle";
    /// A filter by name.
    pub(in crate::template) const FILTER: &str = "@filter";
    /// A test by name.
    pub(in crate::template) const TEST: &str = "@test";
}

/// `node` with its operations replaced. Recursion is as deep as the tree.
pub(super) fn statement<'a>(node: &Stmt<'a>) -> Stmt<'a> {
    match node {
        Stmt::Template(s) => Stmt::Template(with(s, ast::Template { children: body(&s.children) })),
        Stmt::EmitExpr(s) => Stmt::EmitExpr(with(s, ast::EmitExpr { expr: expression(&s.expr) })),
        Stmt::EmitRaw(s) => {
            let text = constant(Value::from(s.raw), s.span());
            Stmt::EmitExpr(with(s, ast::EmitExpr { expr: filter(names::TEXT, text, Vec::new(), s.span()) }))
        }
        Stmt::ForLoop(s) => Stmt::ForLoop(with(s, for_loop(s))),
        Stmt::IfCond(s) => Stmt::IfCond(with(
            s,
            ast::IfCond { expr: expression(&s.expr), true_body: body(&s.true_body), false_body: body(&s.false_body) },
        )),
        Stmt::WithBlock(s) => {
            let assign = |(target, value): &(Expr<'a>, Expr<'a>)| (expression(target), stored(target, value));
            let assignments = s.assignments.iter().map(assign).collect();
            Stmt::WithBlock(with(s, ast::WithBlock { assignments, body: body(&s.body) }))
        }
        Stmt::Set(s) => {
            Stmt::Set(with(s, ast::Set { target: expression(&s.target), expr: stored(&s.target, &s.expr) }))
        }
        Stmt::SetBlock(s) => Stmt::SetBlock(with(
            s,
            ast::SetBlock {
                target: expression(&s.target),
                filter: s.filter.as_ref().map(expression),
                body: body(&s.body),
            },
        )),
        Stmt::AutoEscape(s) => {
            Stmt::AutoEscape(with(s, ast::AutoEscape { enabled: readable(&s.enabled), body: body(&s.body) }))
        }
        Stmt::FilterBlock(s) => {
            Stmt::FilterBlock(with(s, ast::FilterBlock { filter: expression(&s.filter), body: body(&s.body) }))
        }
        Stmt::Block(s) => Stmt::Block(with(s, ast::Block { name: s.name, required: s.required, body: body(&s.body) })),
        Stmt::Import(s) => Stmt::Import(with(s, ast::Import { expr: readable(&s.expr), name: expression(&s.name) })),
        Stmt::FromImport(s) => {
            let name =
                |(name, alias): &(Expr<'a>, Option<Expr<'a>>)| (expression(name), alias.as_ref().map(expression));
            let names = s.names.iter().map(name).collect();
            Stmt::FromImport(with(s, ast::FromImport { expr: readable(&s.expr), names }))
        }
        Stmt::Extends(s) => Stmt::Extends(with(s, ast::Extends { name: readable(&s.name) })),
        Stmt::Include(s) => {
            Stmt::Include(with(s, ast::Include { name: readable(&s.name), ignore_missing: s.ignore_missing }))
        }
        Stmt::Macro(s) => Stmt::Macro(with(s, macro_of(s))),
        Stmt::CallBlock(s) => {
            let macro_decl = with(&s.macro_decl, macro_of(&s.macro_decl));
            Stmt::CallBlock(with(s, ast::CallBlock { call: call(&s.call), macro_decl }))
        }
        Stmt::Continue(s) => Stmt::Continue(with(s, ast::Continue)),
        Stmt::Break(s) => Stmt::Break(with(s, ast::Break)),
        Stmt::Do(s) => Stmt::Do(with(s, ast::Do { call: call(&s.call) })),
    }
}

fn with<T, U>(node: &Spanned<T>, replaced: U) -> Spanned<U> {
    Spanned::new(replaced, node.span())
}

fn body<'a>(nodes: &[Stmt<'a>]) -> Vec<Stmt<'a>> {
    nodes.iter().map(statement).collect()
}

fn expressions<'a>(nodes: &[Expr<'a>]) -> Vec<Expr<'a>> {
    nodes.iter().map(expression).collect()
}

fn for_loop<'a>(node: &ast::ForLoop<'a>) -> ast::ForLoop<'a> {
    ast::ForLoop {
        target: expression(&node.target),
        iter: expression(&node.iter),
        filter_expr: node.filter_expr.as_ref().map(expression),
        recursive: node.recursive,
        body: body(&node.body),
        else_body: body(&node.else_body),
    }
}

fn macro_of<'a>(node: &ast::Macro<'a>) -> ast::Macro<'a> {
    ast::Macro {
        name: node.name,
        args: expressions(&node.args),
        defaults: expressions(&node.defaults),
        body: body(&node.body),
    }
}

/// The value of an assignment: what is stored in a namespace must not lead back to it.
fn stored<'a>(target: &Expr<'a>, value: &Expr<'a>) -> Expr<'a> {
    let has_attribute = match target {
        Expr::GetAttr(_) => true,
        Expr::Tuple(targets) => targets.items.iter().any(|target| !matches!(target, Expr::Var(_))),
        Expr::List(targets) => targets.items.iter().any(|target| !matches!(target, Expr::Var(_))),
        _ => false,
    };
    if has_attribute { filter(names::STORED, expression(value), Vec::new(), value.span()) } else { expression(value) }
}

/// An expression whose value can be read as a whole.
fn readable<'a>(node: &Expr<'a>) -> Expr<'a> {
    match node {
        Expr::Const(_) => expression(node),
        _ => filter(names::READABLE, expression(node), Vec::new(), node.span()),
    }
}

fn constant<'a>(value: Value, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

fn filter<'a>(name: &'static str, first: Expr<'a>, others: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let args = others.into_iter().map(CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(first), args }, span))
}

/// A filter or test of the template, called by its name.
fn by_name<'a>(
    which: &'static str,
    name: &'a str,
    first: Option<Expr<'a>>,
    args: &[CallArg<'a>],
    span: Span,
) -> Expr<'a> {
    // The engine ignores white space in dotted names.
    let name: String = name.split_ascii_whitespace().collect();
    let mut all = vec![CallArg::Pos(constant(Value::from(name), span))];
    all.extend(args.iter().map(|arg| argument(arg, expression)));
    Expr::Filter(Spanned::new(ast::Filter { name: which, expr: first, args: all }, span))
}

fn argument<'a>(arg: &CallArg<'a>, value: fn(&Expr<'a>) -> Expr<'a>) -> CallArg<'a> {
    let spread = |node: &Expr<'a>| filter(names::SPREAD, expression(node), Vec::new(), node.span());
    match arg {
        CallArg::Pos(node) => CallArg::Pos(value(node)),
        CallArg::Kwarg(name, node) => CallArg::Kwarg(name, value(node)),
        CallArg::PosSplat(node) => CallArg::PosSplat(spread(node)),
        CallArg::KwargSplat(node) => CallArg::KwargSplat(spread(node)),
    }
}

/// Methods of objects cannot be counted, so what they get is checked here. Functions are this crate's own or macros.
fn call<'a>(node: &Spanned<ast::Call<'a>>) -> Spanned<ast::Call<'a>> {
    let value = if matches!(node.expr, Expr::GetAttr(_)) { readable } else { expression };
    let mut args: Vec<CallArg<'a>> = node.args.iter().map(|arg| argument(arg, value)).collect();
    let callee = match &node.expr {
        Expr::GetAttr(method) if method.name == "cycle" => {
            args.insert(0, CallArg::Pos(expression(&method.expr)));
            Expr::Var(with(method, ast::Var { id: names::CYCLE }))
        }
        callee => expression(callee),
    };
    with(node, ast::Call { expr: callee, args })
}

fn expression<'a>(node: &Expr<'a>) -> Expr<'a> {
    let span = node.span();
    match node {
        Expr::Var(e) => Expr::Var(with(e, ast::Var { id: e.id })),
        Expr::Const(e) => constant(e.value.clone(), span),
        Expr::Slice(e) => {
            let none = || constant(Value::from(()), span);
            let bounds = [&e.start, &e.stop, &e.step].map(|bound| bound.as_ref().map_or_else(none, expression));
            filter(names::SLICE, expression(&e.expr), bounds.into(), span)
        }
        Expr::UnaryOp(e) => {
            let op = if matches!(e.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(with(e, ast::UnaryOp { op, expr: expression(&e.expr) }))
        }
        Expr::BinOp(e) => binary(e),
        Expr::Compare(e) => {
            let ops = e.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: readable(&op.expr) }).collect();
            Expr::Compare(with(e, ast::Compare { expr: readable(&e.expr), ops }))
        }
        Expr::IfExpr(e) => Expr::IfExpr(with(
            e,
            ast::IfExpr {
                test_expr: expression(&e.test_expr),
                true_expr: expression(&e.true_expr),
                false_expr: e.false_expr.as_ref().map(expression),
            },
        )),
        Expr::Filter(e) => by_name(names::FILTER, e.name, e.expr.as_ref().map(expression), &e.args, span),
        Expr::Test(e) => by_name(names::TEST, e.name, Some(expression(&e.expr)), &e.args, span),
        Expr::GetAttr(e) => Expr::GetAttr(with(e, ast::GetAttr { expr: expression(&e.expr), name: e.name })),
        Expr::GetItem(e) => filter(names::ITEM, expression(&e.expr), vec![expression(&e.subscript_expr)], span),
        Expr::Call(e) => Expr::Call(call(e)),
        Expr::List(e) => Expr::List(with(e, ast::List { items: expressions(&e.items) })),
        Expr::Tuple(e) => Expr::Tuple(with(e, ast::Tuple { items: expressions(&e.items) })),
        Expr::Map(e) => {
            let keys = e.keys.iter().map(readable).collect();
            Expr::Map(with(e, ast::Map { keys, values: expressions(&e.values) }))
        }
    }
}

fn binary<'a>(node: &Spanned<ast::BinOp<'a>>) -> Expr<'a> {
    let (left, right) = (expression(&node.left), expression(&node.right));
    let name = match node.op {
        BinOpKind::Add => names::ADD,
        BinOpKind::Mul => names::MUL,
        BinOpKind::Concat => names::CONCAT,
        BinOpKind::Eq => names::EQ,
        BinOpKind::Ne => names::NE,
        BinOpKind::Lt => names::LT,
        BinOpKind::Lte => names::LTE,
        BinOpKind::Gt => names::GT,
        BinOpKind::Gte => names::GTE,
        BinOpKind::In => names::IN,
        // These take a value as it is, or make a number.
        BinOpKind::ScAnd
        | BinOpKind::ScOr
        | BinOpKind::Sub
        | BinOpKind::Div
        | BinOpKind::FloorDiv
        | BinOpKind::Rem
        | BinOpKind::Pow => return Expr::BinOp(with(node, ast::BinOp { op: node.op, left, right })),
    };
    filter(name, left, vec![right], node.span())
}
