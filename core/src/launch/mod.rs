//! Launch tables: what the code of a GPU takes, declared once. A [`Kernel`] names its texts, its tensors, its constants and
//! its scalars; a backend writes the declarations down in its device's language, and what a launch gives is checked
//! against them. `route` holds what the kernels of all backends have in common.

use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

use crate::tensor::{DType, Tensor};

pub mod route;

/// Floats of either kind.
pub const FLOAT: &[DType] = &[DType::F32, DType::Bf16];
/// bf16 only.
pub const BF16: &[DType] = &[DType::Bf16];
/// f32 only.
pub const F32: &[DType] = &[DType::F32];
/// Integers only.
pub const U32: &[DType] = &[DType::U32];

/// An extent as a device takes it. Only an empty tensor may have one past 2^32, and nothing is read of it.
pub fn word(extent: usize) -> u32 {
    u32::try_from(extent).unwrap_or(u32::MAX)
}

/// The numbers that cross from the host to a kernel beside its tensors, each a u32. Declared by
/// [`scalars!`](crate::scalars!).
pub trait Scalars: Copy + 'static {
    /// The names of the fields in order.
    const FIELDS: &'static [&'static str];

    /// The fields in order.
    fn words(self) -> Vec<u32>;
}

/// Declares a struct of u32 fields that is [`Scalars`].
///
/// ```
/// use dropless_core::launch::Scalars;
///
/// dropless_core::scalars!(
///     /// The extents of a matrix.
///     struct Extents { rows, columns }
/// );
/// assert_eq!(Extents::FIELDS, ["rows", "columns"]);
/// assert_eq!(Extents { rows: 2, columns: 3 }.words(), [2, 3]);
/// ```
#[macro_export]
macro_rules! scalars {
    ($(#[$doc:meta])* $vis:vis struct $name:ident { $($field:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $name {
            $(#[doc = concat!("`", stringify!($field), "` of the kernel.")] $vis $field: u32,)+
        }

        impl $crate::launch::Scalars for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field)),+];

            fn words(self) -> Vec<u32> {
                vec![$(self.$field),+]
            }
        }
    };
}

/// How a kernel uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads elements.
    Read,
    /// Reads elements, and the 4 or 16 bytes in which one lies.
    ReadUnits,
    /// Writes elements.
    Write,
    /// Reads and writes elements.
    InPlace,
    /// Changes an element from many threads at once.
    Atomic,
}

impl Access {
    /// Whether nothing is written.
    pub const fn reads_only(self) -> bool {
        matches!(self, Access::Read | Access::ReadUnits)
    }
}

/// A tensor that a kernel works on.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// Its name in the kernel.
    pub name: &'static str,
    /// How it is used.
    pub access: Access,
    /// Element types it is used with.
    pub types: &'static [DType],
    /// Whether it may be absent.
    pub optional: bool,
}

impl Binding {
    const fn new(name: &'static str, access: Access, types: &'static [DType]) -> Binding {
        Binding { name, access, types, optional: false }
    }

    /// See [`Access::Read`].
    pub const fn read(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::new(name, Access::Read, types)
    }

    /// See [`Access::ReadUnits`].
    pub const fn read_units(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::new(name, Access::ReadUnits, types)
    }

    /// See [`Access::Write`].
    pub const fn write(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::new(name, Access::Write, types)
    }

    /// See [`Access::InPlace`].
    pub const fn in_place(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::new(name, Access::InPlace, types)
    }

    /// See [`Access::Atomic`].
    pub const fn atomic(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::new(name, Access::Atomic, types)
    }

    /// The same, which may be absent.
    pub const fn optional(self) -> Binding {
        Binding { optional: true, ..self }
    }

    /// Whether a tensor of this type (or none) may stand here.
    fn accepts(&self, dtype: Option<DType>) -> bool {
        dtype.map_or(self.optional, |dtype| self.types.contains(&dtype))
    }
}

/// What a kernel is made of and takes, whatever the type of its scalars. Each is a static, and no two are the same.
#[derive(Debug)]
pub struct Program {
    /// The entry point; also the file's name.
    pub name: &'static str,
    /// The texts it is compiled from, in order, its own last.
    pub files: &'static [&'static str],
    /// The names of its scalars.
    pub scalars: &'static [&'static str],
    /// Its tensors.
    pub tensors: &'static [Binding],
    /// The names of constants that a launch gives values.
    pub constants: &'static [&'static str],
    /// How many tensor maps it takes, through which CUDA's TMA moves boxes of a tensor.
    pub maps: usize,
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Program {}

impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::ptr::from_ref(self).hash(state);
    }
}

/// A kernel (a shader, in WGSL) with scalars of type `S`.
#[derive(Debug)]
pub struct Kernel<S> {
    /// What it declares.
    pub program: Program,
    scalars: PhantomData<fn(S)>,
}

impl<S: Scalars> Kernel<S> {
    /// A kernel without constants and tensor maps.
    pub const fn new(name: &'static str, files: &'static [&'static str], tensors: &'static [Binding]) -> Kernel<S> {
        assert!(tensors.len() <= TENSORS, "a variant has room for them");
        let program = Program { name, files, scalars: S::FIELDS, tensors, constants: &[], maps: 0 };
        Kernel { program, scalars: PhantomData }
    }

    /// The same with constants of these names.
    pub const fn constants(self, constants: &'static [&'static str]) -> Kernel<S> {
        assert!(constants.len() <= CONSTANTS, "a variant has room for them");
        Kernel { program: Program { constants, ..self.program }, ..self }
    }

    /// The same with so many tensor maps.
    pub const fn maps(self, maps: usize) -> Kernel<S> {
        Kernel { program: Program { maps, ..self.program }, ..self }
    }
}

/// The most tensors and constants of a kernel.
const TENSORS: usize = 16;
const CONSTANTS: usize = 20;

/// A kernel with its element types and constants: what is compiled. As small as a key that is looked up at every launch
/// should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The kernel.
    pub program: &'static Program,
    types: [Option<DType>; TENSORS],
    constants: [u32; CONSTANTS],
}

impl Hash for Variant {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.program.hash(state);
        // Four bits each.
        let types = self.types.iter().fold(0u64, |all, dtype| all << 4 | dtype.map_or(0, |dtype| dtype as u64 + 1));
        types.hash(state);
        self.constants.hash(state);
    }
}

impl Variant {
    /// The kernel with tensors of these types (None: absent) and these constants, in the order of its declaration.
    ///
    /// # Panics
    /// When it declares others.
    pub fn new(
        program: &'static Program,
        types: impl IntoIterator<Item = Option<DType>>,
        constants: &[u32],
    ) -> Variant {
        let name = program.name;
        let mut variant = Variant { program, types: [None; TENSORS], constants: [0; CONSTANTS] };
        let mut given = 0;
        for dtype in types {
            let binding = program.tensors.get(given).unwrap_or_else(|| panic!("{name}: a tensor too many"));
            assert!(binding.accepts(dtype), "{name}: {} is {dtype:?}, declared as {binding:?}", binding.name);
            variant.types[given] = dtype;
            given += 1;
        }
        assert_eq!(given, program.tensors.len(), "{name}: tensors");
        assert_eq!(constants.len(), program.constants.len(), "{name}: constants");
        variant.constants[..constants.len()].copy_from_slice(constants);
        variant
    }

    /// As [`new`](Variant::new), with the types of these tensors.
    ///
    /// # Panics
    /// As [`new`](Variant::new).
    pub fn of(program: &'static Program, tensors: &[Option<&Tensor>], constants: &[u32]) -> Variant {
        Variant::new(program, tensors.iter().map(|tensor| tensor.map(Tensor::dtype)), constants)
    }

    /// The same with the last type that it may have for each tensor that is absent: for a language in which a kernel learns
    /// at run time what is absent.
    #[must_use]
    pub fn complete(mut self) -> Variant {
        for (dtype, binding) in self.types.iter_mut().zip(self.program.tensors) {
            *dtype = dtype.or(binding.types.last().copied());
        }
        self
    }

    /// The tensors with their types.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static Binding, Option<DType>)> {
        self.program.tensors.iter().zip(self.types)
    }

    /// The constants with their values.
    pub fn constants(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.program.constants.iter().copied().zip(self.constants)
    }
}

/// What a launch gives to a kernel, in the order in which it declares them.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a, S, const T: usize, const C: usize> {
    /// The numbers.
    pub scalars: S,
    /// The tensors.
    pub tensors: [Option<&'a Tensor>; T],
    /// The constants.
    pub constants: [u32; C],
}

#[cfg(test)]
mod tests {
    use super::*;

    scalars!(
        /// None of interest.
        struct Extents { rows, columns }
    );

    static KERNEL: Kernel<Extents> = Kernel::new(
        "test",
        &["text"],
        &[Binding::read("x", FLOAT), Binding::read("weight", BF16).optional(), Binding::write("out", F32)],
    )
    .constants(&["WIDTH"]);

    const X: Option<DType> = Some(DType::Bf16);
    const OUT: Option<DType> = Some(DType::F32);

    #[test]
    fn variants_are_told_apart_by_all_that_a_kernel_is_compiled_with() {
        static OTHER: Kernel<Extents> = Kernel::new("test", &["text"], KERNEL.program.tensors).constants(&["WIDTH"]);
        let all = [
            Variant::new(&KERNEL.program, [X, None, OUT], &[1]),
            Variant::new(&KERNEL.program, [OUT, None, OUT], &[1]),
            Variant::new(&KERNEL.program, [X, X, OUT], &[1]),
            Variant::new(&KERNEL.program, [X, None, OUT], &[2]),
            Variant::new(&OTHER.program, [X, None, OUT], &[1]),
        ];
        let distinct: std::collections::HashSet<Variant> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(distinct.contains(&Variant::new(&KERNEL.program, [X, None, OUT], &[1])));
        assert_eq!(all[0].complete(), all[2]);
        let named: Vec<_> = all[0].tensors().map(|(binding, dtype)| (binding.name, dtype)).collect();
        assert_eq!(named, [("x", X), ("weight", None), ("out", OUT)]);
        assert_eq!(all[3].constants().collect::<Vec<_>>(), [("WIDTH", 2)]);
    }

    #[test]
    #[should_panic(expected = "test: tensors")]
    fn a_tensor_too_few() {
        Variant::new(&KERNEL.program, [X, X], &[1]);
    }

    #[test]
    #[should_panic(expected = "test: a tensor too many")]
    fn a_tensor_too_many() {
        Variant::new(&KERNEL.program, [X, X, OUT, OUT], &[1]);
    }

    #[test]
    #[should_panic(expected = "test: out is None, declared as")]
    fn a_tensor_that_must_be_there() {
        Variant::new(&KERNEL.program, [X, X, None], &[1]);
    }

    #[test]
    #[should_panic(expected = "test: weight is Some(F32), declared as")]
    fn a_tensor_of_another_type() {
        Variant::new(&KERNEL.program, [X, OUT, OUT], &[1]);
    }

    #[test]
    #[should_panic(expected = "test: constants")]
    fn a_constant_too_few() {
        Variant::new(&KERNEL.program, [X, X, OUT], &[]);
    }
}
