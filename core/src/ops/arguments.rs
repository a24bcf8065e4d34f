//! What an op is made of: tensors that it reads or writes, and plain values.
//!
//! Below each op's struct stands, in a line of [`op!`], what the op does with each of its fields; a forgotten field does not
//! compile. From that line follow the list of the op's tensors and the same op over other tensors, which backends around
//! other backends stand on: see [`Op`] and [`Checked::over`].

use std::fmt;

use super::Checked;
use crate::backend::Backend;
use crate::error::{Error, Result, ensure};
use crate::tensor::Tensor;

/// How an op uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it, maybe in part, and reads nothing of it. What it does not write stays.
    Write,
    /// Writes it in place: may also read it.
    Update,
}

/// The name of a field: `out`, or `row.codes` within a field of several tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FieldName {
    outer: &'static str,
    inner: Option<&'static str>,
}

impl FieldName {
    pub(super) const fn new(outer: &'static str) -> FieldName {
        FieldName { outer, inner: None }
    }

    /// A field of the tensors in this field.
    pub(super) const fn within(self, inner: &'static str) -> FieldName {
        FieldName { inner: Some(inner), ..self }
    }
}

impl fmt::Display for FieldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inner {
            None => f.write_str(self.outer),
            Some(inner) => write!(f, "{}.{inner}", self.outer),
        }
    }
}

/// A tensor of an op, with the field's name and what the op does with it.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// The field.
    pub field: FieldName,
    /// What the op does with it.
    pub access: Access,
    /// The tensor.
    pub tensor: &'a Tensor,
}

/// An op that a [`Backend`] has a method for.
pub trait Op<'a>: Copy + fmt::Debug {
    /// The same op over other tensors.
    type Over<'b>: Op<'b>;

    /// The names that [`name`](Op::name) gives.
    const NAMES: &'static [&'static str];

    /// The op's name, one for each op.
    fn name(&self) -> &'static str;

    /// Calls `visit` for each tensor, in the order of the fields.
    fn visit(&self, visit: &mut dyn FnMut(Use<'a>));

    /// The same op with `view(t)` in the place of every tensor t, asked for in the order of [`visit`](Op::visit).
    ///
    /// # Errors
    /// Those of `view`.
    fn with_tensors<'b>(&self, view: View<'a, 'b, '_>) -> Result<Self::Over<'b>>;

    /// The specification: computes the checked op in the memory of a backend, one element after the other, under that
    /// backend's model of matrix products. It defines the bits.
    ///
    /// # Errors
    /// Those of [`Backend::read`] and [`Backend::write`].
    fn spec(op: &Checked<Self>, memory: &dyn Backend) -> Result<()>;

    /// Queues the checked op.
    ///
    /// # Errors
    /// As the backend's method.
    fn queue(op: &Checked<Self>, backend: &dyn Backend) -> Result<()>;

    /// Its tensors, in the order of the fields.
    fn uses(&self) -> Vec<Use<'a>> {
        let mut uses = Vec::new();
        self.visit(&mut |one| uses.push(one));
        uses
    }

    /// What it writes.
    fn outputs(&self) -> Vec<Use<'a>> {
        let mut outputs = self.uses();
        outputs.retain(|one| one.access != Access::Read);
        outputs
    }
}

/// Which tensor takes the place of one of an op's.
pub type View<'a, 'b, 'f> = &'f mut dyn FnMut(&'a Tensor) -> Result<&'b Tensor>;

impl<T> Checked<T> {
    /// Calls `run` with the same op over other tensors: `view(t)` for every tensor t. It need not be checked again, since
    /// what was checked holds of them too.
    ///
    /// # Errors
    /// [`Error::Argument`] for a view of another shape, element type or memory than its tensor, or in the buffer of
    /// another one where the tensors had buffers of their own; those of `view` and `run`.
    pub fn over<'a, R>(
        &self,
        view: impl FnMut(&'a Tensor) -> Result<Tensor>,
        run: impl FnOnce(&Checked<T::Over<'_>>) -> Result<R>,
    ) -> Result<R>
    where
        T: Op<'a>,
    {
        let uses = self.0.uses();
        let views = uses.iter().map(|one| one.tensor).map(view).collect::<Result<Vec<Tensor>>>()?;
        for (i, (one, view)) in uses.iter().zip(&views).enumerate() {
            let tensor = one.tensor;
            ensure(
                view.shape() == tensor.shape() && view.dtype() == tensor.dtype() && view.memory() == tensor.memory(),
                self.0.name(),
                one.field.outer,
                || format!("a view like its tensor, {tensor:?} in {:?} memory", tensor.memory()),
                || format!("{view:?} in {:?} memory", view.memory()),
            )?;
            for (other, its_view) in uses.iter().zip(&views).skip(i + 1) {
                ensure(
                    tensor.shares_storage(other.tensor) || !view.shares_storage(its_view),
                    self.0.name(),
                    one.field.outer,
                    || "a buffer of its own, as its tensor".to_owned(),
                    || format!("the buffer of {}", other.field),
                )?;
            }
        }
        let mut next = views.iter();
        let missing = || Error::ForeignTensor { op: self.0.name(), backend: "none" };
        let op = self.0.with_tensors(&mut |_| next.next().ok_or_else(missing))?;
        run(&Checked(op))
    }

    /// The specification: see [`Op::spec`].
    ///
    /// # Errors
    /// As [`Op::spec`].
    pub fn spec<'a>(&self, memory: &dyn Backend) -> Result<()>
    where
        T: Op<'a>,
    {
        T::spec(self, memory)
    }

    /// Queues the op on a backend; as the backend's method for it.
    ///
    /// # Errors
    /// As that method.
    pub fn queue<'a>(&self, backend: &dyn Backend) -> Result<()>
    where
        T: Op<'a>,
    {
        T::queue(self, backend)
    }
}

/// What the field of an op may be: a tensor, or several in a struct, an option or an array.
pub(super) trait Field<'a>: Copy {
    type Over<'b>;

    fn visit(self, field: FieldName, access: Access, visit: &mut dyn FnMut(Use<'a>));

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<Self::Over<'b>>;
}

impl<'a> Field<'a> for &'a Tensor {
    type Over<'b> = &'b Tensor;

    fn visit(self, field: FieldName, access: Access, visit: &mut dyn FnMut(Use<'a>)) {
        visit(Use { field, access, tensor: self });
    }

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<&'b Tensor> {
        view(self)
    }
}

impl<'a, F: Field<'a>> Field<'a> for Option<F> {
    type Over<'b> = Option<F::Over<'b>>;

    fn visit(self, field: FieldName, access: Access, visit: &mut dyn FnMut(Use<'a>)) {
        if let Some(one) = self {
            one.visit(field, access, visit);
        }
    }

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<Self::Over<'b>> {
        self.map(|one| one.with_tensors(view)).transpose()
    }
}

impl<'a, F: Field<'a>> Field<'a> for [F; 2] {
    type Over<'b> = [F::Over<'b>; 2];

    fn visit(self, field: FieldName, access: Access, visit: &mut dyn FnMut(Use<'a>)) {
        for (one, index) in self.into_iter().zip(["0", "1"]) {
            one.visit(field.within(index), access, visit);
        }
    }

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<Self::Over<'b>> {
        let [first, second] = self;
        Ok([first.with_tensors(&mut *view)?, second.with_tensors(view)?])
    }
}

/// Says how an op uses each of its fields: it `read`s, `write`s or `update`s a tensor (see [`Access`]); a `value` is none.
macro_rules! op {
    ($name:ident: $($access:ident($($field:ident),+)),+) => {
        impl<'a> $name<'a> {
            pub(in crate::ops) fn visit(&self, visit: &mut dyn FnMut($crate::ops::Use<'a>)) {
                $($($crate::ops::arguments::op!(@visit $access self.$field, visit);)+)+
            }

            pub(in crate::ops) fn with_tensors<'b>(
                &self,
                view: $crate::ops::View<'a, 'b, '_>,
            ) -> $crate::Result<$name<'b>> {
                Ok($name { $($($field: $crate::ops::arguments::op!(@over $access self.$field, view),)+)+ })
            }
        }
    };
    (@visit value $self:ident.$field:ident, $visit:ident) => {};
    (@visit read $($rest:tt)+) => { $crate::ops::arguments::op!(@access Read $($rest)+) };
    (@visit write $($rest:tt)+) => { $crate::ops::arguments::op!(@access Write $($rest)+) };
    (@visit update $($rest:tt)+) => { $crate::ops::arguments::op!(@access Update $($rest)+) };
    (@access $access:ident $self:ident.$field:ident, $visit:ident) => {{
        let field = $crate::ops::FieldName::new(stringify!($field));
        $crate::ops::arguments::Field::visit($self.$field, field, $crate::ops::Access::$access, $visit)
    }};
    (@over value $self:ident.$field:ident, $view:ident) => { $self.$field };
    (@over $access:ident $self:ident.$field:ident, $view:ident) => {
        $crate::ops::arguments::Field::with_tensors($self.$field, &mut *$view)?
    };
}
pub(super) use op;

/// Makes a struct the field of an op, which says what it does with the struct's `tensor`s; a `value` is none.
macro_rules! tensors {
    ($name:ident: tensor($($tensor:ident),+) $(, value($($value:ident),+))?) => {
        impl<'a> $crate::ops::arguments::Field<'a> for $name<'a> {
            type Over<'b> = $name<'b>;

            fn visit(
                self,
                field: $crate::ops::FieldName,
                access: $crate::ops::Access,
                visit: &mut dyn FnMut($crate::ops::Use<'a>),
            ) {
                $(self.$tensor.visit(field.within(stringify!($tensor)), access, visit);)+
            }

            fn with_tensors<'b>(self, view: $crate::ops::View<'a, 'b, '_>) -> $crate::Result<$name<'b>> {
                Ok($name { $($tensor: self.$tensor.with_tensors(&mut *view)?,)+ $($($value: self.$value,)+)? })
            }
        }
    };
}
pub(super) use tensors;

/// Makes a struct that a method of the backend takes an [`Op`].
macro_rules! queued {
    ($name:ident, named $op:expr, by $method:ident) => {
        impl<'a> $crate::ops::Op<'a> for $name<'a> {
            type Over<'b> = $name<'b>;

            const NAMES: &'static [&'static str] = &[$op];

            fn name(&self) -> &'static str {
                $op
            }

            fn visit(&self, visit: &mut dyn FnMut($crate::ops::Use<'a>)) {
                $name::visit(self, visit);
            }

            fn with_tensors<'b>(&self, view: $crate::ops::View<'a, 'b, '_>) -> $crate::Result<$name<'b>> {
                $name::with_tensors(self, view)
            }

            fn spec(op: &$crate::ops::Checked<Self>, memory: &dyn $crate::Backend) -> $crate::Result<()> {
                $name::spec(op, memory)
            }

            fn queue(op: &$crate::ops::Checked<Self>, backend: &dyn $crate::Backend) -> $crate::Result<()> {
                backend.$method(op)
            }
        }
    };
}
pub(super) use queued;

/// Makes an enum of ops that one method of the backend takes an [`Op`].
macro_rules! family {
    ($name:ident { $($variant:ident named $op:expr),+ $(,)? }, by $method:ident) => {
        impl<'a> $crate::ops::Op<'a> for $name<'a> {
            type Over<'b> = $name<'b>;

            const NAMES: &'static [&'static str] = &[$($op),+];

            fn name(&self) -> &'static str {
                match self { $($name::$variant(_) => $op,)+ }
            }

            fn visit(&self, visit: &mut dyn FnMut($crate::ops::Use<'a>)) {
                match self { $($name::$variant(op) => op.visit(visit),)+ }
            }

            fn with_tensors<'b>(&self, view: $crate::ops::View<'a, 'b, '_>) -> $crate::Result<$name<'b>> {
                Ok(match self { $($name::$variant(op) => $name::$variant(op.with_tensors(view)?),)+ })
            }

            fn spec(op: &$crate::ops::Checked<Self>, memory: &dyn $crate::Backend) -> $crate::Result<()> {
                match &**op { $($name::$variant(op) => op.spec(memory),)+ }
            }

            fn queue(op: &$crate::ops::Checked<Self>, backend: &dyn $crate::Backend) -> $crate::Result<()> {
                backend.$method(op)
            }
        }
    };
}
pub(super) use family;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ops::{AdamW, BlockFormat, ColumnBlocks, Combine, GemmKind, GroupQuantize, GroupedGemm, Map, Operand};
    use crate::tensor::{DType, Memory};

    fn tensor(len: usize) -> Tensor {
        Tensor::from_storage(Arc::new(len), &[len], DType::F32, Memory::Device)
    }

    fn names(uses: &[Use<'_>]) -> Vec<String> {
        uses.iter().map(|one| format!("{:?} {}", one.access, one.field)).collect()
    }

    /// Whether `T` lists the tensors 0, 1, 2, .. that it was made of, and takes others in their places.
    fn rebuilds<'a, T: Op<'a>>(op: T, expected: &[&str]) {
        let uses = op.uses();
        assert_eq!(names(&uses), expected);
        let lengths = uses.iter().map(|one| one.tensor.len()).collect::<Vec<_>>();
        assert_eq!(lengths, (0..expected.len()).collect::<Vec<_>>());
        let others = (0..expected.len()).map(tensor).collect::<Vec<_>>();
        let rebuilt = op.with_tensors(&mut |t| Ok(&others[t.len()])).unwrap();
        assert_eq!(names(&rebuilt.uses()), expected);
        for (one, other) in rebuilt.uses().iter().zip(&others) {
            assert!(one.tensor.shares_storage(other), "{} is another tensor", one.field);
        }
        let writes = names(&uses).into_iter().filter(|name| !name.starts_with("Read")).collect::<Vec<_>>();
        assert_eq!(names(&op.outputs()), writes);
    }

    #[test]
    fn an_op_lists_its_tensors_and_is_rebuilt_over_others() {
        let t: Vec<Tensor> = (0..9).map(tensor).collect();
        let product = GroupedGemm {
            kind: GemmKind::Forward,
            a: Operand::gathered(&t[0], &t[1]),
            b: Operand::Fp8Block { codes: &t[2], scale_inv: &t[3], gather: None },
            offsets: &t[4],
            out: &t[5],
            accumulate: true,
        };
        let expected =
            ["Read a.values", "Read a.gather", "Read b.codes", "Read b.scale_inv", "Read offsets", "Update out"];
        rebuilds(product, &expected);
        let quantize = GroupQuantize {
            x: &t[0],
            gather: None,
            offsets: None,
            format: BlockFormat::Mxfp8 { floor: false },
            square: true,
            row: None,
            column: Some(ColumnBlocks { codes: &t[1], scales: &t[2], offsets: Some(&t[3]) }),
            amax: None,
        };
        rebuilds(quantize, &["Read x", "Write column.codes", "Write column.scales", "Write column.offsets"]);
        let add = [None, Some(&t[2])];
        let combine = Combine { x: &t[0], slots: &t[1], ids: None, leaves: (0, 2), window: None, add, out: &t[3] };
        rebuilds(Map::from(combine), &["Read x", "Read slots", "Read add.1", "Write out"]);
    }

    /// An op of one backend over tensors of another.
    fn adamw<'a>(t: &'a [Tensor]) -> Map<'a> {
        let [grad, clip, step, param, m, v, param_bf16] = [0, 1, 2, 3, 4, 5, 6].map(|i| &t[i]);
        AdamW {
            grad,
            clip,
            step,
            beta1: 0.0,
            beta2: 0.0,
            eps: 1.0,
            decay: 0.0,
            param,
            m,
            v,
            param_bf16: Some(param_bf16),
        }
        .into()
    }

    #[test]
    fn a_checked_op_goes_over_to_views_that_keep_what_was_checked() {
        let tensors: Vec<Tensor> = (0..7).map(tensor).collect();
        let checked = Checked(adamw(&tensors));
        let run = |view: &dyn Fn(&Tensor) -> Tensor| {
            checked.over(|t| Ok(view(t)), |over| Ok(over.uses().iter().map(|one| one.tensor.len()).collect::<Vec<_>>()))
        };
        assert_eq!(run(&|t| tensor(t.len())).unwrap(), [0, 1, 2, 3, 4, 5, 6]);

        let shape = run(&|t| tensor(t.len() + usize::from(t.len() == 4))).unwrap_err().to_string();
        assert_eq!(
            shape,
            "adamw: m is F32[5] in Device memory, expected a view like its tensor, F32[4] in Device memory"
        );
        let one = tensor(6);
        let shared = run(&|t| if t.len() < 5 { tensor(t.len()) } else { one.slice(0, t.len()).unwrap() });
        assert_eq!(
            shared.unwrap_err().to_string(),
            "adamw: v is the buffer of param_bf16, expected a buffer of its own, as its tensor"
        );
    }
}
